"""torch.tpu.compile_step: forward, backward and optimizer update as one executable.

The step's Python code runs once for each kind of call (capture.py); what it did becomes a program (tape.py). Later
calls check that what the code saw still holds, and launch the program. Read `CompiledStep.__call__` first.
"""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from ..eager import dispatcher, random
from ..lowering import context
from ..runtime import client, errors, executable, jax_door, transfer
from ..tensor import buffer, torch_door
from . import capture, compile_doors, symbol, tape
from . import options as compile_options
from .capture import External, HostInput, Recorder, Traced
from .tape import Program, Value

Tensor = torch.Tensor

_counter = itertools.count()
_CAPTURES_BEFORE_WARNING = 8


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
        self.hooks = len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        self.parts = [(place, dict(place)) for place in (module._parameters, module._buffers, module._modules)]

    def changed(self) -> str | None:
        module = self.module
        if module.training is not self.training:
            return f"{type(module).__name__}.training changed"
        if len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks) != self.hooks:
            return f"{type(module).__name__} has other hooks"
        for place, before in self.parts:
            if len(place) != len(before):
                return f"{type(module).__name__} has other parts"
            for name, value in before.items():
                if place.get(name) is not value:
                    return f"{type(module).__name__}.{name} is another object"
        return None


def _hooks(tensor: Any) -> tuple[int, int]:
    return len(tensor._backward_hooks or ()), len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


_MISSING = object()
_NOTHING: dict[str, Any] = {}


@dataclass
class Variant:
    """A program with what must hold for it, and what becomes of its results."""

    program: Program
    sources: list[Callable[[list[Any]], buffer.Buffer]]  # per input: its buffer, from the flat arguments
    shapes: list[tuple[Any, Any]]
    aliases: tuple[int, ...]
    numbers: list[Callable[[list[Any]], float]]
    draws: list[Any]
    updated: list[int]  # inputs that get a new array, in the order of the first outputs
    grads: list[Gradient]  # parameter, which output (-1: none), strides
    leaves: list[tuple[Tensor, bool]]  # parameter, whether it has a gradient before the step
    kept: list[tuple[Any, int]]  # storages that outlive the step, which output
    returned: Callable[[list[Any], list[Any]], Any]
    groups: list[Groups]
    modules: list[ModuleState]
    layouts: list[tuple[Tensor, tuple[int, ...], tuple[int, ...], bool, tuple[int, int]]]
    host_values: list[tuple[Any, Any]]
    assumptions: list[tuple[symbol.Expression, Any]]
    closure: list[tuple[Callable[[], Any], Any]]
    bumped: list[Tensor]
    once: bool = False
    calls: int = 0
    signature: Any = None
    began: bool = False  # left optimizer state or other tensors behind

    def reason(self, flat: list[Any]) -> str | None:
        """Why the program does not serve this call; None when it does."""
        if self.once and self.calls:
            return "the first call left new state behind"
        for parameter, had in self.leaves:
            if (parameter.grad is not None) != had:
                return "a gradient is there that was not, or the other way round"
        for module in self.modules:
            changed = module.changed()
            if changed is not None:
                return changed
        for tensor, sizes, strides, needs, hooks in self.layouts:
            if tensor.shape != sizes or tensor.stride() != strides or tensor.requires_grad is not needs \
                    or _hooks(tensor) != hooks:
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


class CompiledStep:
    """What torch.tpu.compile_step returns. Call it as the function it was made from."""

    def __init__(self, function: Callable[..., Any], name: str, xla: dict[str, Any], donate: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self.name = name or f"{getattr(function, '__name__', type(function).__name__)}.step{next(_counter)}"
        self._xla = xla
        self._donate = donate
        self._variants: dict[Any, list[Variant]] = {}
        self._executables: dict[str, executable.Executable] = {}
        self._last: Variant | None = None
        self._captures = 0
        self._keys: list[Any] = []

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
        key = (spec, context.key(), torch.is_grad_enabled(), _autocast(), tuple(map(_describe, flat)))
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
        buffers = [source(flat) for source in variant.sources]
        for held, (shape, dtype) in zip(buffers, variant.shapes):
            if held.shape != shape or held.dtype != dtype:
                return None
        if _aliases(buffers) != variant.aliases:
            return None
        return buffers

    def _launch(self, variant: Variant, flat: list[Any], buffers: list[buffer.Buffer]) -> Any:
        if self._donate:
            for position in variant.updated:
                if buffers[position].shared:
                    _own(buffers[position])
        outputs = self._execute(variant, flat, buffers)
        for position, array in zip(variant.updated, outputs):
            buffers[position].rebind(array)
        _set_gradients(variant, outputs)
        for reference, position in variant.kept:
            storage = reference()
            if storage is not None:
                storage._tpu_buffer.rebind(outputs[position])
        if variant.bumped:
            torch.autograd.graph.increment_version(variant.bumped)
        return variant.returned(outputs, flat)

    def _execute(self, variant: Variant, flat: list[Any], buffers: list[buffer.Buffer]) -> list[Any]:
        arrays = [held.array() for held in buffers]
        for number in variant.numbers:
            arrays.append(transfer.scalar(number(flat), _FLOAT))
        if variant.draws:
            arrays.append(jax_door.put(_draw(variant.draws), client.get().device))
        outputs = variant.program.executable(arrays)
        variant.calls += 1
        self._last = variant
        return outputs

    # -- the first call of its kind

    def _capture(self, args: Any, kwargs: Any, flat: list[Any], key: Any, why: str | None) -> Any:
        dispatcher.load()
        self._captures += 1
        run = _Run(self, args, kwargs, flat)
        before = len(self._executables)
        variant, result = run.go()
        made = len(self._executables) > before
        known = self._variants.setdefault(key, [])
        previous = [other for others in self._variants.values() for other in others]
        expected = bool(known) and known[0].began and known[0].calls == 1  # the first step sets up state
        if made and before and not expected:
            cause = why or _difference(self._keys, key)
            warnings.warn(f"torch.tpu.compile_step: {self.name} was compiled again (program {before + 1}): {cause}",
                          RuntimeWarning, stacklevel=3)
        if variant.once and any(other.once and other.signature == variant.signature
                                and not any(reference() is not None for reference, _ in other.kept)
                                for other in previous):
            variant.once = False  # leaves the same behind each time: an attribute that the step sets
        self._keys.append(key)
        known[:] = [other for other in known if not (other.once and other.calls)]
        known.insert(0, variant)
        del known[_CAPTURES_BEFORE_WARNING:]
        if self._captures - len(self._variants) == _CAPTURES_BEFORE_WARNING and not made:
            warnings.warn(f"torch.tpu.compile_step: the Python code of {self.name} has run {self._captures} times: "
                          f"{why}. It runs again whenever what it depends on changes", RuntimeWarning, stacklevel=3)
        return result


_FLOAT = np.dtype(np.float64)


def _autocast() -> Any:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("tpu", "cpu"))


def _describe(leaf: Any) -> Any:
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
    if not keys:
        return "its first call"
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


def _aliases(buffers: list[buffer.Buffer]) -> tuple[int, ...]:
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(id(held), len(seen)) for held in buffers)


def _own(held: buffer.Buffer) -> None:
    """Makes the array the buffer's alone, so that the program may take its memory over."""
    tensor = buffer.wrap(held.array())
    copy = buffer.of(tensor.clone())
    assert copy is not None
    held.rebind(copy.array())


def _set_gradients(variant: Variant, outputs: list[Any]) -> None:
    for parameter, position, strides in variant.grads:
        parameter.grad = None if position < 0 else buffer.wrap(outputs[position], tuple(parameter.shape), strides)


def _draw(draws: list[Any]) -> Any:
    """Keys in the order in which eager mode would draw them."""
    parts = [random.draw(generator, len(list(group))) for generator, group in itertools.groupby(draws)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _Run:
    """One capture of a step, and its first execution."""

    def __init__(self, step: CompiledStep, args: Any, kwargs: Any, flat: list[Any]) -> None:
        self.step = step
        self.args, self.kwargs, self.flat = args, kwargs, flat
        self.recorder = Recorder()
        self.groups: dict[int, Groups] = {}
        self.modules: dict[int, torch.nn.Module] = {}
        self.rates: list[tuple[dict[str, Any], Any, Any]] = []
        self.number_sources: list[Callable[[list[Any]], float]] = []

    def go(self) -> tuple[Variant, Any]:
        recorder = self.recorder
        closure = _closure(self.step._function)
        for leaf in self.flat:
            if isinstance(leaf, Tensor) and leaf.device.type == "tpu":
                recorder.owner(leaf)
        flat = list(self.flat)
        for position, leaf in enumerate(flat):
            if type(leaf) is float:
                flat[position] = recorder.number(leaf)
                self.number_sources.append(functools.partial(lambda at, given: given[at], position))
        args, kwargs = pytree.tree_unflatten(flat, pytree.tree_flatten((self.args, self.kwargs))[1])
        try:
            with self._around(), capture.Watch(recorder), recorder:
                result = [self.step._function(*args, **kwargs)]
            return self._finish(result, closure)
        except BaseException:
            self._undo()
            raise

    @contextmanager
    def _around(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(compile_doors.compiling())
            stack.enter_context(compile_doors.eager_stance())
            stack.enter_context(compile_doors.scaler_steps(self._conditional_step))
            stack.enter_context(compile_doors.symbolic_extrema())
            for handle in (register_optimizer_step_pre_hook(self._before_optimizer),
                           register_optimizer_step_post_hook(self._after_optimizer),
                           module_hooks.register_module_forward_pre_hook(self._see_module)):
                stack.callback(handle.remove)
            yield

    # -- hooks

    def _see_module(self, module: torch.nn.Module, _: Any) -> None:
        self.modules[id(module)] = module

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        if not any(p.device.type == "tpu" for group in optimizer.param_groups for p in group["params"]):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.device.type == "tpu":
                    recorder.track(parameter)
        if id(optimizer) not in self.groups:
            self._prepare(optimizer)
        held = self.groups[id(optimizer)]
        for group, rate in zip(optimizer.param_groups, held.rates):
            if rate is None:
                continue
            value = group["lr"]
            at = ("number", rate)
            number = torch.SymFloat(symbol.Node(at, "float", value, recorder._assume))
            group["lr"] = recorder.filled(number) if group.get("fused") else number
            self.rates.append((group, value, group["lr"]))
        recorder.in_optimizer = True

    def _prepare(self, optimizer: Optimizer) -> None:
        """Puts step counts on the device (`capturable`, as CUDA graphs need it), and notes settings and state."""
        recorder = self.recorder
        recorder.paused = True
        try:
            for group in optimizer.param_groups:
                if group.get("capturable") is False:
                    group["capturable"] = True
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    for name, value in state.items():
                        if isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0 \
                                and parameter.device.type == "tpu":
                            state[name] = value.to("tpu")
                            recorder.adopt(state[name])
        finally:
            recorder.paused = False
        rates: list[int | None] = []
        for group in optimizer.param_groups:
            if type(group.get("lr")) is float:
                rates.append(len(recorder.numbers))
                recorder.number(group["lr"])
                self.number_sources.append(functools.partial(lambda held, given: held["lr"], group))
            else:
                rates.append(None)
        self.groups[id(optimizer)] = Groups(
            optimizer, [{name: value for name, value in group.items()
                         if name != "params" and not (name == "lr" and rate is not None)}
                        for group, rate in zip(optimizer.param_groups, rates)],
            rates, {parameter: dict(optimizer.state.get(parameter, {})) for group in optimizer.param_groups
                    for parameter in group["params"]}, [list(group["params"]) for group in optimizer.param_groups])

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.recorder.in_optimizer = False
        self._restore_rates()

    def _restore_rates(self) -> None:
        changed = [group for group, _, ours in self.rates if group["lr"] is not ours]
        for group, value, _ in self.rates:
            group["lr"] = value
        self.rates.clear()
        if changed:
            raise errors.CaptureError("the step changes the learning rate while the optimizer runs; call the "
                                      "scheduler outside the compiled step")

    def _conditional_step(self, optimizer: Optimizer, found: list[Tensor], args: Any, kwargs: Any) -> Any:
        """GradScaler's `if no inf was found: optimizer.step()`, with both outcomes in the program."""
        recorder = self.recorder
        total = functools.reduce(lambda a, b: a + b, found)
        outer, recorder.journal = recorder.journal, []
        result = optimizer.step(*args, **kwargs)
        journal, recorder.journal = recorder.journal, outer
        recorder.choose(total, journal)
        return result

    # -- after the capture

    def _undo(self) -> None:
        for group, value, _ in self.rates:
            group["lr"] = value
        self.recorder.rollback()
        for groups in self.groups.values():
            state = groups.optimizer.state
            for parameter, values in groups.before.items():
                if values:
                    state[parameter] = dict(values)
                elif parameter in state:
                    del state[parameter]

    def _finish(self, result: list[Any], closure: list[tuple[Callable[[], Any], Any]]) -> tuple[Variant, Any]:
        recorder = self.recorder
        for groups in self.groups.values():
            for group, rate in zip(groups.optimizer.param_groups, groups.rates):
                now = group.get("lr")
                if rate is not None and now != recorder.numbers[rate]:
                    group["lr"] = recorder.numbers[rate]
                    raise errors.CaptureError("the step changes the optimizer's learning rate (a scheduler's step() "
                                              "inside it?); call the scheduler outside the compiled step")
        outputs: list[Value] = []
        returned = _returned(result.pop(), recorder, outputs, self.flat)  # its graph must not outlive the capture
        grads, grad_values = self._gradients(outputs)
        gc.collect()
        alive = [storage for reference in recorder.made if (storage := reference()) is not None
                 and getattr(storage, "_tpu_traced", None) is not None and id(storage) not in grad_values]
        adopted: dict[Value, Any] = {}
        for storage in alive:
            held: Traced = storage._tpu_traced
            if held.value is not held.first and _constant(held.first):
                adopted[held.first] = storage
        kept: list[tuple[Any, int]] = []
        updated: list[tuple[Value, Value]] = []
        for external in recorder.externals.values():
            if external.value is not external.first:
                updated.append((external.first, external.value))
        for storage in alive:
            held = storage._tpu_traced
            if held.first in adopted:
                updated.append((held.first, held.value))
            else:
                kept.append((storage, len(outputs)))
                outputs.append(held.value)
        return self._build(updated, outputs, adopted, kept, grads, returned, closure)

    def _gradients(self, outputs: list[Value]) -> tuple[list[Gradient], set[int]]:
        """What becomes of .grad: unchanged or written in place (nothing to do), gone, or a new tensor."""
        recorder = self.recorder
        found: list[Gradient] = []
        storages: set[int] = set()
        for parameter, before in recorder.leaves.values():
            now = parameter.grad
            if now is before:
                continue
            if now is None:
                found.append((parameter, -1, ()))
                continue
            held = capture.traced(now)
            if held is None or not _whole(now, held.value):
                raise errors.CaptureError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is a window on another tensor "
                    "after the step; assign a tensor of its own (clone())")
            storages.add(id(now.untyped_storage()))
            found.append((parameter, len(outputs), now.stride()))
            outputs.append(held.value)
        return found, storages

    def _build(self, updated: list[tuple[Value, Value]], outputs: list[Value], adopted: dict[Value, Any],
               kept: list[tuple[Any, int]], grads: list[Gradient], returned: Any,
               closure: list[tuple[Callable[[], Any], Any]]) -> tuple[Variant, Any]:
        recorder, step = self.recorder, self.step
        # In the order in which the program reads them, so that a second capture makes the same program.
        program = recorder.tape.build(updated, outputs, set(adopted), list(enumerate(recorder.numbers)), step.name,
                                      step._xla, step._donate, step._executables)
        by_value: dict[Value, External | HostInput] = {e.first: e for e in recorder.externals.values()}
        by_value.update({h.value: h for h in recorder.host_inputs})
        for value, storage in adopted.items():
            if value in program.inputs:
                _settle(storage, _initial(value))
        for parameter, before in recorder.leaves.values():  # the program begins where the Python code did
            if parameter.grad is not before:
                parameter.grad = before
        sources = [self._source(value, by_value, adopted) for value in program.inputs]
        buffers = [source(self.flat) for source in sources]
        for position in program.donated:
            if buffers[position].shared:
                _own(buffers[position])
        offset = len(updated)
        once = not self._only_state(kept, adopted)
        variant = Variant(
            program, sources, [(held.shape, held.dtype) for held in buffers], _aliases(buffers),
            self.number_sources, recorder.draws, program.updated,
            [(p, at + offset if at >= 0 else at, strides) for p, at, strides in grads],
            [(parameter, before is not None) for parameter, before in recorder.leaves.values()],
            [], lambda results, flat: returned(results, flat, offset), list(self.groups.values()),
            self._module_guards(), self._layouts(), self._host_values(),
            recorder.assumptions, closure,
            [e.tensor for e in recorder.externals.values() if e.value is not e.first], once=once,
            signature=(program.executable, len(kept), len(adopted)), began=bool(kept) or bool(adopted))
        generators = [(source, source.get_state()) for source, _ in recorder.states.values()]
        for source, state in recorder.states.values():
            source.set_state(state)
        results = step._execute(variant, self.flat, buffers)
        for source, state in generators:
            source.set_state(state)
        for position, array in zip(variant.updated, results):
            buffers[position].rebind(array)
        _set_gradients(variant, results)
        for storage, at in kept:
            _settle(storage, results[at + offset])
            variant.kept.append((weakref.ref(storage), at + offset))
        return variant, variant.returned(results, self.flat)

    def _only_state(self, kept: list[tuple[Any, int]], adopted: dict[Value, Any]) -> bool:
        """Whether all that the step left behind is optimizer state, which the guards know."""
        state = {id(value.untyped_storage()) for groups in self.groups.values()
                 for values in groups.optimizer.state.values() for value in values.values()
                 if isinstance(value, Tensor)}
        return all(id(storage) in state for storage in [s for s, _ in kept] + list(adopted.values()))

    def _source(self, value: Value, by_value: dict[Value, Any],
                adopted: dict[Value, Any]) -> Callable[[list[Any]], buffer.Buffer]:
        if value in adopted:
            storage = adopted[value]
            return lambda flat: storage._tpu_buffer
        owner = by_value[value]
        if isinstance(owner, HostInput):
            return self._host_source(owner.tensor)
        for position, leaf in enumerate(self.flat):
            if isinstance(leaf, Tensor) and buffer.of(leaf) is owner.buffer:
                return functools.partial(_of_argument, position)
        for parameter, grad in self.recorder.leaves.values():
            if grad is not None and buffer.of(grad) is owner.buffer:
                return functools.partial(_of_gradient, parameter)
        return functools.partial(_of_tensor, owner.tensor)

    def _host_source(self, tensor: Tensor) -> Callable[[list[Any]], buffer.Buffer]:
        read = self._host_read(tensor)

        def upload(flat: list[Any]) -> buffer.Buffer:
            held = buffer.of(buffer.wrap(transfer.to_device(read(flat))))
            assert held is not None
            return held

        return upload

    def _host_read(self, tensor: Tensor) -> Callable[[list[Any]], Tensor]:
        for position, leaf in enumerate(self.flat):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" \
                    and leaf.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                window = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
                return functools.partial(_host_window, position, window)
        return lambda flat: tensor.detach()

    def _host_values(self) -> list[tuple[Any, Any]]:
        def reader(tensor: Tensor) -> Any:
            read = self._host_read(tensor)
            return lambda flat: read(flat).item()

        return [(reader(tensor), value) for tensor, value in self.recorder.host_values]

    def _module_guards(self) -> list[ModuleState]:
        every: dict[int, torch.nn.Module] = {}
        for module in self.modules.values():
            if id(module) not in every:
                every.update({id(part): part for part in module.modules()})
        return [ModuleState(module) for module in every.values()]

    def _layouts(self) -> list[tuple[Tensor, tuple[int, ...], tuple[int, ...], bool, tuple[int, int]]]:
        return [(p, tuple(p.shape), p.stride(), p.requires_grad, _hooks(p)) for p, _ in self.recorder.leaves.values()]


def _host_window(position: int, window: Any, flat: list[Any]) -> Tensor:
    return flat[position].detach().as_strided(*window)


def _of_argument(position: int, flat: list[Any]) -> buffer.Buffer:
    held = buffer.of(flat[position])
    assert held is not None
    return held


def _of_gradient(parameter: Tensor, flat: list[Any]) -> buffer.Buffer:
    assert parameter.grad is not None
    held = buffer.of(parameter.grad)
    assert held is not None
    return held


def _of_tensor(tensor: Tensor, flat: list[Any]) -> buffer.Buffer:
    held = buffer.of(tensor)
    assert held is not None
    return held


def _constant(value: Value) -> bool:
    """Whether memory begins with the same at every step: state that the step sets up."""
    if value.maker is not None:
        return value.maker.constant()
    return value.blank or value.literal is not None


def _initial(value: Value) -> Any:
    """The array that a constant describes."""
    if value.literal is not None:
        return jax_door.put(value.literal, client.get().device)
    if value.maker is None:
            return jax_door.put(np.zeros(value.shape, value.dtype), client.get().device)
    entry = value.maker
    single = tape.Tape()
    single.entries.append(entry)
    at = [index for index, made in enumerate(entry.made) if made is value]
    assert at
    program = single.build([], [value], set(), [], f"{entry.name} of new state", {}, False, {})
    return program.executable([])[0]


def _settle(storage: Any, array: Any) -> None:
    """Gives a tensor of the capture its data."""
    held = buffer.of(buffer.wrap(array))
    storage._tpu_buffer = held
    del storage._tpu_traced


def _whole(tensor: Tensor, value: Value) -> bool:
    return tensor.storage_offset() == 0 and tensor.numel() == _count(value.shape)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _closure(function: Callable[..., Any]) -> list[tuple[Callable[[], Any], Any]]:
    """Variables of the function that Python code may rebind between calls: numbers, strings, tensors."""
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    found: list[tuple[Callable[[], Any], Any]] = []
    if code is None:
        return found
    simple = (bool, int, float, str, type(None), Tensor)
    for cell in inner.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if isinstance(value, simple):
            found.append((functools.partial(getattr, cell, "cell_contents"), value))
    for name in code.co_names:
        value = inner.__globals__.get(name, _MISSING)
        if isinstance(value, simple):
            found.append((functools.partial(inner.__globals__.get, name), value))
    return found


def _returned(result: Any, recorder: Recorder, outputs: list[Value],
              flat: list[Any]) -> Callable[[list[Any], list[Any], int], Any]:
    """What makes the step's result from the program's outputs."""
    leaves, spec = pytree.tree_flatten(result)
    makers: list[Callable[[list[Any], list[Any], int, dict[int, Tensor]], Any]] = []
    places: dict[int, int] = {}
    for leaf in leaves:
        expression = symbol.expression(leaf)
        if expression is not None:
            raise errors.CaptureError("the step returns a Python number that it computes on the device (item()); "
                                      "return the tensor, and call item() on it outside")
        if isinstance(leaf, Tensor) and leaf.device.type == "tpu":
            owner = recorder.owner(leaf)
            window = tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype
            if isinstance(owner, External):
                source = leaf.detach()
                position = next((i for i, given in enumerate(flat) if isinstance(given, Tensor)
                                 and buffer.of(given) is owner.buffer), None)
                makers.append(functools.partial(_give_external, source, position, window))
            else:
                if id(owner) not in places:
                    places[id(owner)] = len(outputs)
                    outputs.append(owner.value)
                makers.append(functools.partial(_give_output, places[id(owner)], window))
        elif isinstance(leaf, Tensor):
            known = recorder.host_made.get(leaf.untyped_storage()._cdata)
            if known is None or known[1]:
                raise errors.CaptureError("the step returns a CPU tensor that depends on its inputs; the host's part "
                                          "of a step runs only once")
            makers.append(functools.partial(lambda value, *_: value, leaf))
        elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            makers.append(functools.partial(lambda value, *_: value, leaf))
        else:
            raise errors.CaptureError(f"the step returns a {type(leaf).__name__}; return tensors, or tuples, lists and "
                                      "dicts of them")

    def returned(results: list[Any], given: list[Any], offset: int) -> Any:
        shared: dict[int, Tensor] = {}
        return pytree.tree_unflatten([make(results, given, offset, shared) for make in makers], spec)

    return returned


def _give_external(source: Tensor, position: int | None, window: Any, results: Any, given: Any, offset: int,
                   shared: Any) -> Tensor:
    tensor = source if position is None else given[position].detach()
    return torch_door.as_strided(tensor, *window[:3])


def _give_output(position: int, window: Any, results: list[Any], given: Any, offset: int,
                 shared: dict[int, Tensor]) -> Tensor:
    base = shared.get(position)
    if base is None:
        base = shared[position] = buffer.wrap(results[position + offset])
    sizes, strides, start, dtype = window
    if base.dtype != dtype:
        base = base.view(dtype)
    return base if (tuple(base.shape), base.stride(), 0) == (sizes, strides, start) else torch_door.as_strided(
        base, sizes, strides, start)


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
