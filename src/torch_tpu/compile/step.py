"""torch.tpu.compile_step: forward, backward and optimizer update as one executable.

The step's Python code runs once for each kind of call (first_run.py, capture.py); what it did becomes a program
(tape.py). Later calls check that what the code saw still holds (variant.py), and launch the program.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..eager import dispatcher
from ..lowering import context
from ..runtime import executable, partition
from ..tensor import buffer, placement
from . import causes
from . import options as compile_options
from . import variant as variants
from .first_run import Run
from .variant import Variant

Tensor = torch.Tensor

_counter = itertools.count()
_capturing = threading.RLock()  # a capture sets hooks that all threads see
_CAPTURES_BEFORE_WARNING = 8


class CompiledStep:
    """What torch.tpu.compile_step returns. Call it as the function it was made from."""

    def __init__(self, function: Callable[..., Any], name: str, xla: dict[str, Any], donate: bool,
                 many: bool = False) -> None:
        functools.update_wrapper(self, function, updated=())
        self._many = many  # many programs are expected
        self._function = function
        self.name = name or f"{getattr(function, '__name__', type(function).__name__)}.step{next(_counter)}"
        self._xla = xla
        self._donate = donate
        self._variants: dict[Any, list[Variant]] = {}
        self._executables: dict[str, executable.Executable] = {}
        self._last: Variant | None = None
        self._captures = 0
        self._keys: list[Any] = []
        self._objects: list[Any] = []  # arguments that are told apart by their identity

    @property
    def compiles(self) -> int:
        """Programs made so far."""
        return len(self._executables)

    @property
    def captures(self) -> int:
        """How often the step's Python code ran."""
        return self._captures

    def memory(self) -> Any:
        """XLA's statement about the program that ran last: argument, output, alias and temporary bytes."""
        return self._ran().program.executable.memory()

    def hlo(self) -> str:
        """The optimised HLO of the program that ran last."""
        return self._ran().program.executable.hlo()

    def reset(self) -> None:
        """Forgets all programs."""
        self._variants.clear()
        self._executables.clear()
        self._last = None

    def _ran(self) -> Variant:
        if self._last is None:
            raise RuntimeError("the step has not run yet")
        return self._last

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        if partition.current is not None:
            for leaf in flat:
                if isinstance(leaf, Tensor):
                    placement.batch(leaf)
        return self.call(args, kwargs, flat, spec, tuple(map(describe, flat)))

    def call(self, args: Any, kwargs: Any, flat: list[Any], spec: Any, described: tuple[Any, ...]) -> Any:
        """A call whose arguments are flattened and described already."""
        key = (spec, context.key(), torch.is_grad_enabled(), _autocast(), described)
        known = self._variants.get(key)
        why = None
        if known:
            for variant in known:
                why = variant.reason(flat)
                if why is None:
                    found = self._inputs(variant, flat)
                    if found is not None:
                        return self._launch(variant, flat, found)
                    why = "memory of a tensor has another form"
        return self._capture(args, kwargs, flat, key, why)

    # -- a later call

    def _inputs(self, variant: Variant, flat: list[Any]) -> list[buffer.Buffer] | None:
        buffers = variant.inputs(flat)
        if None in buffers:
            return None
        same = [held.kind for held in buffers] == variant.kinds and variants.aliases(buffers) == variant.aliases
        return buffers if same else None

    def _launch(self, variant: Variant, flat: list[Any], buffers: list[buffer.Buffer]) -> Any:
        if self._donate:
            for position in variant.updated:
                if buffers[position].shared:
                    variants.own(buffers[position])
        outputs = self.execute(variant, flat, buffers)
        for position, array in zip(variant.updated, outputs):
            buffers[position].rebind(array)
        variants.set_gradients(variant, outputs)
        for reference, position in variant.kept:
            storage = reference()
            if storage is not None:
                storage._tpu_buffer.rebind(outputs[position])
        if variant.bumped:
            torch.autograd.graph.increment_version(variant.bumped)
        variant.check(outputs)
        return variant.returned(outputs, flat)

    def execute(self, variant: Variant, flat: list[Any], buffers: list[buffer.Buffer]) -> list[Any]:
        outputs = variant.execute(flat, buffers)
        self._last = variant
        return outputs

    # -- the first call of its kind

    def _capture(self, args: Any, kwargs: Any, flat: list[Any], key: Any, why: str | None) -> Any:
        with _capturing:
            return self._capture_alone(args, kwargs, flat, key, why)

    def _capture_alone(self, args: Any, kwargs: Any, flat: list[Any], key: Any, why: str | None) -> Any:
        dispatcher.load()
        self._captures += 1
        cause = why or (_difference(self._keys, key) if self._keys else causes.FIRST)
        run = Run(self, args, kwargs, flat, cause)
        before = len(self._executables)
        variant, result = run.go()
        made = len(self._executables) > before
        known = self._variants.setdefault(key, [])
        previous = [other for others in self._variants.values() for other in others]
        expected = bool(known) and known[0].began and known[0].calls == 1  # the first step sets up state
        if made and before and not expected and not self._many:
            warnings.warn(f"torch.tpu.compile_step: {self.name} was compiled again (program {before + 1}): {cause}",
                          RuntimeWarning, stacklevel=3)
        if variant.once and any(other.once and other.signature == variant.signature
                                and not any(reference() is not None for reference, _ in other.kept)
                                for other in previous):
            variant.once = False  # leaves the same behind each time: an attribute that the step sets
        self._keys.append(key)
        self._objects += [leaf for leaf, told in zip(flat, key[-1]) if told == (type(leaf), id(leaf))]
        known[:] = [other for other in known if not (other.once and other.calls) and not other.stale()]
        known.insert(0, variant)
        del known[_CAPTURES_BEFORE_WARNING:]
        if self._captures - len(self._variants) == _CAPTURES_BEFORE_WARNING and not made and not self._many:
            warnings.warn(f"torch.tpu.compile_step: the Python code of {self.name} has run {self._captures} times: "
                          f"{why}. It runs again whenever what it depends on changes", RuntimeWarning, stacklevel=3)
        return result


def _autocast() -> Any:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("tpu", "cpu"))


def describe(leaf: Any) -> Any:
    """What of an argument the program depends on."""
    if isinstance(leaf, Tensor):
        return leaf.device.type, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.requires_grad
    if isinstance(leaf, bool | int | str | type(None) | torch.dtype | torch.device):
        return type(leaf), leaf
    if type(leaf) is float:
        return float
    return type(leaf), id(leaf)


def _difference(keys: list[Any], key: Any) -> str:
    """What is new about a call."""
    last = keys[-1]
    if last[0] != key[0]:
        return "the arguments have another structure"
    if last[1:4] != key[1:4]:
        return "gradient mode, autocast or a numeric setting of PyTorch changed"
    for number, (was, now) in enumerate(zip(last[4], key[4])):
        if was != now:
            if now[0] == "tpu" or now[0] == "cpu":
                return (f"tensor {number} of the arguments is {now[1]} {list(now[2])} on {now[0]}, before it was "
                        f"{was[1]} {list(was[2])} on {was[0]}" if isinstance(was, tuple) and len(was) == 6
                        else f"argument {number} is a tensor")
            return f"argument {number} is {now[1]!r}, before it was {was[1] if isinstance(was, tuple) else was!r}"
    return "an object it depends on changed"


def compile_step(step: Any = None, *, optimizer: Optimizer | None = None, loss: Callable[..., Tensor] | None = None,
                 max_grad_norm: float | None = None, name: str = "", xla: dict[str, Any] | None = None,
                 donate: bool = True) -> Any:
    """See torch.tpu.compile_step."""
    compile_options.parse(None, {"name": name, "xla": xla or {}, "donate": donate})
    if step is None:
        return functools.partial(compile_step, optimizer=optimizer, loss=loss, max_grad_norm=max_grad_norm, name=name,
                                 xla=xla, donate=donate)
    if isinstance(step, torch.nn.Module):
        if optimizer is None:
            raise TypeError("compile_step(model) needs optimizer=; or give it a function that does the whole step")
        step = _training_step(step, optimizer, loss, max_grad_norm)
    elif optimizer is not None or loss is not None or max_grad_norm is not None:
        raise TypeError("optimizer=, loss= and max_grad_norm= go with a model; a function does its own step")
    if isinstance(step, CompiledStep):
        return step
    if not callable(step):
        raise TypeError(f"compile_step takes a function or a module, got a {type(step).__name__}")
    return CompiledStep(step, name, xla or {}, donate)


def _training_step(model: torch.nn.Module, optimizer: Optimizer, loss: Callable[..., Tensor] | None,
                   max_grad_norm: float | None) -> Callable[..., Tensor]:
    def train_step(*args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("tpu"), (args, kwargs))
        if loss is None:
            output = model(*args, **kwargs)
            value = output if isinstance(output, Tensor) else output.loss
        else:
            *inputs, target = args
            value = loss(model(*inputs, **kwargs), target)
        value.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return train_step
