"""The first call of a kind: captures a step, makes its program, and runs it."""

from __future__ import annotations

import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from ..distributed import captured
from ..runtime import errors, transfer
from ..tensor import buffer, placement
from . import capture, compile_doors, results, symbol, tape, variant
from .capture import External, HostInput, Recorder, Traced
from .tape import Value
from .variant import Gradient, Groups, Modules, ModuleState, Variant

if TYPE_CHECKING:
    from .step import CompiledStep

Tensor = torch.Tensor

_MISSING = object()


class Run:
    """One capture of a step, and its first execution."""

    def __init__(self, step: CompiledStep, args: Any, kwargs: Any, flat: list[Any], cause: str) -> None:
        self.step = step
        self.cause = cause
        self.args, self.kwargs, self.flat = args, kwargs, flat
        self.recorder = Recorder()
        self.groups: dict[int, Groups] = {}
        self.modules: dict[int, ModuleState] = {}
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
            with _only_new_garbage():
                with self._around(), captured.recording(recorder), capture.Watch(recorder), recorder:
                    before = _host_random()
                    result = [self.step._function(*args, **kwargs)]
                    if _host_random() != before:
                        raise errors.CaptureError(
                            "the step draws random numbers on the host (Python's random, or NumPy's): every step would "
                            "use the same. Draw them outside and pass them, or on the device")
                return self._finish(result, closure)
        except BaseException:
            self._undo()
            raise

    @contextmanager
    def _around(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
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
        if id(module) not in self.modules:
            for part in module.modules():
                if id(part) not in self.modules:
                    self.modules[id(part)] = ModuleState(part)

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
        # The result leaves the list: its autograd graph must not outlive the capture.
        returned = results.returned(result.pop(), recorder, outputs, self.flat)
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
        checks = [(len(outputs) + at, window, raises) for at, (_, window, raises) in enumerate(recorder.checks)]
        outputs += [value for value, _, _ in recorder.checks]
        program = recorder.tape.build(updated, outputs, set(adopted), list(enumerate(recorder.numbers)), step.name,
                                      step._xla, step._donate, step._executables, self.cause)
        by_value: dict[Value, External | HostInput] = {e.first: e for e in recorder.externals.values()}
        by_value.update({h.value: h for h in recorder.host_inputs})
        for value, storage in adopted.items():
            if value in program.inputs:
                _settle(storage, _initial(value))
                if value.pattern is not None:
                    placement.alike(storage._tpu_buffer, value.pattern)
        for parameter, before in recorder.leaves.values():  # the program begins where the Python code did
            if parameter.grad is not before:
                parameter.grad = before
        sources = [self._source(value, by_value, adopted) for value in program.inputs]
        buffers = variant.buffers_of(sources, self.flat)
        for position in program.donated:
            if buffers[position].shared:
                variant.own(buffers[position])
        offset = len(updated)
        once = not self._only_state(kept, adopted)
        made = Variant(
            program, sources, [held.kind for held in buffers], variant.aliases(buffers),
            self.number_sources, recorder.draws, program.updated,
            [(p, at + offset if at >= 0 else at, strides) for p, at, strides in grads],
            [(parameter, before is not None) for parameter, before in recorder.leaves.values()],
            [], lambda outputs, flat: returned(outputs, flat, offset), list(self.groups.values()),
            Modules(self.modules.values()), self._layouts(), self._host_values(),
            recorder.assumptions, closure,
            [e.tensor for e in recorder.externals.values() if e.value is not e.first and not any(
                isinstance(leaf, Tensor) and buffer.of(leaf) is e.buffer for leaf in self.flat)],
            [(at + offset, window, raises) for at, window, raises in checks], once=once,
            signature=(program.executable, len(kept), len(adopted)), began=bool(kept) or bool(adopted))
        generators = [(source, source.get_state()) for source, _ in recorder.states.values()]
        for source, state in recorder.states.values():
            source.set_state(state)
        arrays = step.execute(made, self.flat, buffers)
        for source, state in generators:
            source.set_state(state)
        for position, array in zip(made.updated, arrays):
            buffers[position].rebind(array)
        variant.set_gradients(made, arrays)
        for storage, at in kept:
            _settle(storage, arrays[at + offset])
            made.kept.append((weakref.ref(storage), at + offset))
        made.check(arrays)
        return made, made.returned(arrays, self.flat)

    def _only_state(self, kept: list[tuple[Any, int]], adopted: dict[Value, Any]) -> bool:
        """Whether all that the step left behind is optimizer state, which the guards know."""
        state = {id(value.untyped_storage()) for groups in self.groups.values()
                 for values in groups.optimizer.state.values() for value in values.values()
                 if isinstance(value, Tensor)}
        return all(id(storage) in state for storage in [s for s, _ in kept] + list(adopted.values()))

    def _source(self, value: Value, by_value: dict[Value, Any],
                adopted: dict[Value, Any]) -> variant.Source:
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
        return owner.tensor

    def _host_source(self, tensor: Tensor) -> Callable[[list[Any]], buffer.Buffer]:
        read = self._host_read(tensor)

        def upload(flat: list[Any]) -> buffer.Buffer:
            host = read(flat)
            held = buffer.of(buffer.wrap(transfer.to_device(host, placement.batch_sharding(host.shape))))
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

    def _layouts(self) -> list[tuple[Tensor, tuple[int, ...], tuple[int, ...], bool, tuple[int, int]]]:
        return [(p, tuple(p.shape), p.stride(), p.requires_grad, variant.hooks(p))
                for p, _ in self.recorder.leaves.values()]


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Collections look only at objects made since: a full one takes longer than a capture."""
    if gc.get_freeze_count():  # somebody else's
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _host_random() -> Any:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(keys), rest  # type: ignore[arg-type]


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


def _constant(value: Value) -> bool:
    """Whether memory begins with the same at every step: state that the step sets up."""
    if value.maker is not None:
        return value.maker.constant()
    return value.blank or value.literal is not None


def _initial(value: Value) -> Any:
    """The array that a constant describes."""
    if value.literal is not None:
        return transfer.host_value(value.literal)
    if value.maker is None:
        return transfer.host_value(np.zeros(value.shape, value.dtype))
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
