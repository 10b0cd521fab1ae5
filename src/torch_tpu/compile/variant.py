"""A captured step: its program, what must hold for it, and what becomes of its results."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from ..eager import random
from ..runtime import transfer
from ..tensor import buffer, torch_door
from . import symbol
from .tape import Program

Tensor = torch.Tensor

_FLOAT = np.dtype(np.float64)

Source = Tensor | Callable[[list[Any]], buffer.Buffer]
Gradient = tuple[Tensor, int, tuple[int, ...]]


@dataclass
class Groups:
    """The optimizer's groups and state as the step found them."""

    optimizer: Optimizer
    settings: list[dict[str, Any]]
    rates: list[int | None]  # per group: which number is its learning rate
    before: dict[Tensor, dict[str, Any]]
    members: list[list[Tensor]]

    def hold(self) -> bool:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.settings):
            return False
        for group, settings, rate, members in zip(groups, self.settings, self.rates, self.members):
            for name, value in settings.items():
                now = group.get(name, _MISSING)
                if now is not value and (isinstance(value, Tensor) or isinstance(now, Tensor) or now != value):
                    return False
            if rate is not None and type(group["lr"]) is not float:
                return False
            held = group["params"]
            if len(held) != len(members) or any(a is not b for a, b in zip(held, members)):
                return False
        state = self.optimizer.state
        for parameter, values in self.before.items():
            now_ = state.get(parameter, _NOTHING)
            if len(now_) != len(values) or any(now_.get(k) is not v for k, v in values.items()
                                               if isinstance(v, Tensor) or v is None):
                return False
        return True


class ModuleState:
    """A module as the step's code found it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.training = module.training
        self.forward = module.__dict__.get("forward")  # put in place of the class's, by other libraries
        self.hooks = [(place, list(place.values())) for place in (
            module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)]
        self.parts = [(place, list(place), list(place.values()))
                      for place in (module._parameters, module._buffers, module._modules)]
        # Numbers and switches that forward may look at, such as a dropout rate.
        names = [name for name, value in module.__dict__.items()
                 if type(value) in (bool, int, float, str) and name != "training"]
        self.names = names
        self.read = operator.itemgetter(*names) if names else None
        self.settings = self.read(module.__dict__) if self.read is not None else None

    def changed(self) -> str | None:
        """What is another now."""
        kind = type(self.module).__name__
        if self.module.training is not self.training:
            return f"{kind}.training changed"
        if self.module.__dict__.get("forward") is not self.forward:
            return f"{kind} has another forward"
        if any(not _same(place, values) for place, values in self.hooks):
            return f"{kind} has other hooks"
        for place, names, values in self.parts:
            if list(place) != names:
                return f"{kind} has other parts"
            for name, value in zip(names, values):
                if place[name] is not value:
                    return f"{kind}.{name} is another object"
        before = (self.settings,) if len(self.names) == 1 else self.settings or ()
        for name, value in zip(self.names, before):
            if self.module.__dict__.get(name, _MISSING) != value:
                return f"{kind}.{name} changed"
        return None


class Modules:
    """All modules that a step's code went through; soon compared."""

    def __init__(self, states: Iterable[ModuleState]) -> None:
        self.states = list(states)
        self.modules = [state.module for state in self.states]
        self.own = [state.forward for state in self.states]
        self.code = [(kind, kind.forward) for kind in {type(module): None for module in self.modules}]
        self.training = [state.training for state in self.states]
        places: list[tuple[dict[Any, Any], list[Any]]]
        places = [(place, values) for state in self.states for place, values in state.hooks]
        places += [(place, values) for state in self.states for place, _, values in state.parts]
        self.empty = [place for place, values in places if not values]
        self.filled = [(place, values) for place, values in places if values]
        self.settings = [(state.read, state.module.__dict__, state.settings) for state in self.states
                         if state.read is not None]

    def changed(self) -> str | None:
        """Which module is another now, and how; None when none is."""
        try:
            same = ([module.training for module in self.modules] == self.training and not any(self.empty)
                    and all(kind.forward is code for kind, code in self.code)
                    and all(map(operator.is_, [module.__dict__.get("forward") for module in self.modules], self.own))
                    and all(_same(place, values) for place, values in self.filled)
                    and all(read(now) == before for read, now, before in self.settings))
        except KeyError:  # an attribute is gone
            same = False
        if same:
            return None
        for kind, code in self.code:
            if kind.forward is not code:
                return f"{kind.__name__}.forward is another function"
        return next((reason for state in self.states if (reason := state.changed()) is not None), None)


def _same(place: dict[Any, Any], values: list[Any]) -> bool:
    return len(place) == len(values) and all(map(operator.is_, place.values(), values))


def hooks(tensor: Any) -> tuple[int, int]:
    return len(tensor._backward_hooks or ()), len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


_MISSING = object()
_NOTHING: dict[str, Any] = {}


@dataclass
class Variant:
    """A program with what must hold for it, and what becomes of its results."""

    program: Program
    sources: list[Source]  # per input: the tensor, or what finds its buffer from the flat arguments
    kinds: list[Any]  # their shapes and dtypes
    aliases: tuple[int, ...] | None  # which of them are the same buffer; None when all are different
    numbers: list[Callable[[list[Any]], float]]
    draws: list[Any]
    updated: list[int]  # inputs that get a new array, in the order of the first outputs
    grads: list[Gradient]  # parameter, which output (-1: none), strides
    leaves: list[tuple[Tensor, bool]]  # parameter, whether it has a gradient before the step
    kept: list[tuple[Any, int]]  # storages that outlive the step, which output
    returned: Callable[[list[Any], list[Any]], Any]
    groups: list[Groups]
    modules: Modules
    layouts: list[tuple[Tensor, tuple[int, ...], tuple[int, ...], bool, tuple[int, int]]]
    host_values: list[tuple[Any, Any]]
    assumptions: list[tuple[symbol.Expression, Any]]
    closure: list[tuple[Callable[[], Any], Any]]
    bumped: list[Tensor]
    checks: list[tuple[int, Any, Callable[[Tensor], None]]]  # which output, the window on it, what raises
    once: bool = False
    calls: int = 0
    signature: Any = None
    began: bool = False  # left optimizer state or other tensors behind

    def execute(self, flat: list[Any], buffers: list[buffer.Buffer]) -> list[Any]:
        """Runs the program on the arrays of its inputs; returns its outputs."""
        arrays = [held.array() for held in buffers]
        for number in self.numbers:
            arrays.append(transfer.scalar(number(flat), _FLOAT))
        if self.draws:
            arrays.append(transfer.host_value(_draw(self.draws)))
        self.calls += 1
        return self.program.run(arrays)

    def inputs(self, flat: list[Any]) -> list[Any]:
        """The buffers of the program's inputs now."""
        return buffers_of(self.sources, flat)

    def check(self, outputs: list[Any]) -> None:
        """Raises the errors that the step's own checks ask for."""
        for position, window, raises in self.checks:
            raises(torch_door.as_strided(buffer.wrap(outputs[position]), *window[:3]))

    def stale(self) -> bool:
        """Whether it was captured with optimizer state that is gone; it would only keep that alive."""
        return any(not groups.hold() for groups in self.groups)

    def reason(self, flat: list[Any]) -> str | None:
        """Why the program does not serve this call; None when it does."""
        if self.once and self.calls:
            return "the first call left new state behind"
        for parameter, had in self.leaves:
            if (parameter.grad is not None) != had:
                return "a gradient is there that was not, or the other way round"
        changed = self.modules.changed()
        if changed is not None:
            return changed
        for tensor, sizes, strides, needs, seen in self.layouts:
            if tensor.shape != sizes or tensor.stride() != strides or tensor.requires_grad is not needs \
                    or hooks(tensor) != seen:
                return "a parameter has another shape, layout, requires_grad or hooks"
        for groups in self.groups:
            if not groups.hold():
                return "the optimizer's settings or state changed"
        for get, value in self.closure:
            now = get()
            if now is not value and (isinstance(value, Tensor) or type(now) is not type(value) or now != value):
                return "a variable of the step's function changed"
        for read, value in self.host_values:
            if read(flat) != value:
                return "a number that the step reads from a CPU tensor changed"
        if self.assumptions:
            numbers = [number(flat) for number in self.numbers]
            for expression, value in self.assumptions:
                if symbol.evaluate(expression, lambda at: numbers[at[1]], False) != value:
                    return "a number changed on which Python code of the step depends"
        return None


def buffers_of(sources: list[Source], flat: list[Any]) -> list[Any]:
    """The buffers of inputs; None for a tensor that has left the device."""
    return [getattr(source.untyped_storage(), "_tpu_buffer", None) if isinstance(source, Tensor) else source(flat)
            for source in sources]


def aliases(buffers: list[buffer.Buffer]) -> tuple[int, ...] | None:
    if len(set(map(id, buffers))) == len(buffers):
        return None
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(id(held), len(seen)) for held in buffers)


def own(held: buffer.Buffer) -> None:
    """Makes the array the buffer's alone, so that the program may take its memory over."""
    tensor = buffer.wrap(held.array())
    copy = buffer.of(tensor.clone())
    assert copy is not None
    held.rebind(copy.array())


def set_gradients(variant: Variant, outputs: list[Any]) -> None:
    for parameter, position, strides in variant.grads:
        parameter.grad = None if position < 0 else buffer.wrap(outputs[position], tuple(parameter.shape), strides)


def _draw(draws: list[Any]) -> Any:
    """Keys in the order in which eager mode would draw them."""
    parts = [random.draw(generator, len(list(group))) for generator, group in itertools.groupby(draws)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
