"""A model's or a function's code as one program for a TPU, not compiled: the capture of torch.tpu.compile_step
(compile/first_run.py) and the same lowering table, on tensors without memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..compile.first_run import Run
from ..compile.step import CompiledStep
from ..eager import dispatcher
from ..lowering import context
from ..runtime import dynamo_door, jax_door
from ..tensor import buffer


@dataclass(frozen=True)
class Argument:
    """An input of a program: a parameter, a buffer or an argument of the call, by name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    updated: bool  # in place: its memory is an output too


@dataclass(frozen=True)
class Program:
    """A traced program.

    Attributes:
        module: StableHLO, as text.
        arguments: in the order of the program.
        trace_s: seconds that capture and lowering took.
    """

    name: str
    module: bytes
    arguments: tuple[Argument, ...]
    trace_s: float


@dataclass
class _Lowered:
    """What stands for the executable of a tape."""

    module: bytes
    avals: Sequence[Any]


def _lower(fn: Callable[..., Any], avals: Sequence[Any], name: str, donate: Sequence[int] = (),
           options: Any = None, graph: bool = False, replicas: Any = (), cause: str = "", pins: Any = None) -> _Lowered:
    with dynamo_door.untraced():
        return _Lowered(jax_door.module_bytes(jax_door.lower(jax_door.trace(fn, avals, donate), "tpu")), avals)


class _Trace(Run):
    """A capture that ends with the program.

    Attributes:
        known: names of tensors, by the id of their buffers.
        left: whether the step left tensors behind, which a second call finds.
    """

    known: dict[int, str]
    left = False

    def _build(self, updated: Any, outputs: Any, adopted: Any, kept: Any, grads: Any, returned: Any,
               closure: Any) -> Any:
        recorder, step = self.recorder, self.step
        outputs += [value for value, _, _ in recorder.checks]
        program = recorder.tape.build(updated, outputs, set(adopted), list(enumerate(recorder.numbers)), step.name,
                                      step._xla, step._donate, {}, make=_lower)
        names = {id(external.first): self._name(external.tensor) for external in recorder.externals.values()}
        names.update((id(held.value), "a tensor of the host") for held in recorder.host_inputs)
        names.update((id(value), "optimizer state") for value in adopted)
        arguments = [Argument(names[id(value)], value.shape, value.dtype.name, _bytes(value), at in program.updated)
                     for at, value in enumerate(program.inputs)]
        lowered: Any = program.executable
        arguments += [Argument("a number" if aval.shape == () else "random keys", aval.shape, aval.dtype.name,
                               _bytes(aval), False) for aval in lowered.avals[len(arguments):]]
        self._leave(kept, list(adopted.values()), grads)
        return lowered.module, tuple(arguments)

    def _leave(self, kept: Any, adopted: list[Any], grads: Any) -> None:
        """What the step leaves behind (optimizer state, gradients) stays, without memory."""
        for parameter, at, _ in grads:
            if at >= 0:
                adopted.append(parameter.grad.untyped_storage())
        self.left = bool(kept) or any(at >= 0 for _, at, _ in grads)
        for storage in [storage for storage, _ in kept] + adopted:
            value = storage._tpu_traced.value
            storage._tpu_buffer = buffer.Buffer.uncounted(buffer.kind(value.shape, value.dtype))
            del storage._tpu_traced
        for generator, state in self.recorder.states.values():
            generator.set_state(state)

    def _name(self, tensor: torch.Tensor) -> str:
        return self.known.get(id(buffer.of(tensor)), "a tensor of the function")

    def undo(self) -> None:
        """Everything is as before the capture."""
        self._undo()


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str,
          names: dict[int, str]) -> Program:
    """The program of a call.

    Args:
        function: what is called; reads and writes device tensors.
        names: of tensors, by the id of their buffers.

    Raises:
        CaptureError: the code does what no program can, or uses an operator that has no lowering.
    """
    dispatcher.load()
    flat, _ = pytree.tree_flatten((args, kwargs))
    begin = time.perf_counter()
    runs: list[_Trace] = []
    try:
        with context.targeting("tpu"):
            # A first step may set up state (SGD's momentum): the program is that of the second, which finds it.
            while not runs or (runs[0].left and len(runs) < 2):
                run = _Trace(CompiledStep(function, name, {}, True), args, kwargs, flat, "")
                run.known = names
                traced: Any = run.go()
                runs.append(run)
    finally:
        for run in reversed(runs):
            run.undo()
    module, arguments = traced
    return Program(name, module, arguments, time.perf_counter() - begin)


def _bytes(value: Any) -> int:
    total = value.dtype.itemsize
    for size in value.shape:
        total *= size
    return total
