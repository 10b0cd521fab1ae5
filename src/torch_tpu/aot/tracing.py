"""A model's or a function's code as one program for a TPU, not compiled: the capture of torch.tpu.compile_step
(compile/first_run.py) and the same lowering table, on tensors without memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..compile.first_run import Run
from ..compile.step import CompiledStep
from ..eager import dispatcher
from ..lowering import context
from ..runtime import dynamo_door, errors, jax_door, partition
from ..tensor import buffer
from . import naming
from .spreading import Spreading


@dataclass(frozen=True)
class Argument:
    """An input of a program: a parameter, a buffer or an argument of the call, by name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int  # on one chip
    updated: bool  # in place: its memory is an output too
    layout: tuple[Any, ...] = ()  # on a mesh: the axes that divide its memory


@dataclass(frozen=True)
class Program:
    """A traced program.

    Attributes:
        module: StableHLO, as text.
        arguments: in the order of the program.
        trace_s: seconds that capture and lowering took.
        axes: the mesh that the program is divided over; empty for one chip.
        free: for each result, whether XLA chooses how it is spread.
    """

    name: str
    module: bytes
    arguments: tuple[Argument, ...]
    trace_s: float
    axes: dict[str, int] = field(default_factory=dict)
    free: tuple[bool, ...] = ()


@dataclass
class _Traced:
    """What stands for the executable of a tape."""

    traced: Any
    avals: Sequence[Any]
    donate: Sequence[int]
    pins: dict[int, int]


def _trace(fn: Callable[..., Any], avals: Sequence[Any], name: str, donate: Sequence[int] = (),
           options: Any = None, graph: bool = False, replicas: Any = (), cause: str = "", pins: Any = None) -> _Traced:
    with dynamo_door.untraced():
        traced = jax_door.trace(fn, avals, donate)
    return _Traced(traced, avals, donate, dict(pins() if pins is not None else ()))


class _Trace(Run):
    """A capture that ends with the program.

    Attributes:
        known: names of tensors, by the id of their buffers.
        naming: of modules.
        left: whether the step left tensors behind, which a second call finds.
        spreading: how tensors lie, for several chips.
    """

    known: dict[int, str]
    naming: naming.Names
    spreading: Spreading | None = None
    platform = "tpu"
    left = False

    @contextmanager
    def _around(self) -> Iterator[None]:
        self.recorder.scope = self.naming.current
        with super()._around(), self.naming.watching():
            yield

    def _build(self, updated: Any, outputs: Any, adopted: Any, kept: Any, grads: Any, returned: Any,
               closure: Any) -> Any:
        recorder, step = self.recorder, self.step
        outputs += [value for value, _, _ in recorder.checks]
        program = recorder.tape.build(updated, outputs, set(adopted), list(enumerate(recorder.numbers)), step.name,
                                      step._xla, step._donate, {}, make=_trace)
        names = {id(external.first): self._name(external.tensor) for external in recorder.externals.values()}
        names.update((id(held.value), "a tensor of the host") for held in recorder.host_inputs)
        names.update((id(value), "optimizer state") for value in adopted)
        made: Any = program.executable
        given = self._shardings(program.inputs, len(made.avals))
        arguments = [Argument(names[id(value)], value.shape, value.dtype.name, self._bytes(value, sharding),
                              at in program.updated, tuple(sharding.spec) if sharding is not None else ())
                     for at, (value, sharding) in enumerate(zip(program.inputs, given))]
        arguments += [Argument("a number" if aval.shape == () else "random keys", aval.shape, aval.dtype.name,
                               _bytes(aval), False) for aval in made.avals[len(arguments):]]
        self._leave(kept, list(adopted.values()), grads)
        module, free = self._lower(made, given)
        return module, tuple(arguments), free

    def _lower(self, made: _Traced, given: list[Any]) -> tuple[bytes, tuple[bool, ...]]:
        results = len(jax_door.results(made.traced))
        with dynamo_door.untraced():
            if self.spreading is None:
                return jax_door.named_module_bytes(jax_door.lower(made.traced, "tpu")), (True,) * results
            wanted = [given[made.pins[at]] if at in made.pins else None for at in range(results)]
            try:
                module = partition.lower(self.spreading.mesh, made.traced.jaxpr, made.avals, given, wanted, made.donate,
                                         "tpu")
            except NotImplementedError as error:
                if "Mosaic kernels" not in str(error):
                    raise
                raise errors.CaptureError(f"{self.step.name} has a Pallas kernel, which XLA cannot divide among chips; "
                                          "compile it for one chip, or without the kernel") from error
        return jax_door.named_module_bytes(module), tuple(each is None for each in wanted)

    def _shardings(self, inputs: list[Any], count: int) -> list[Any]:
        """How each argument lies; None for each on one chip."""
        spreading = self.spreading
        if spreading is None:
            return [None] * count
        buffers = {external.first: external.buffer for external in self.recorder.externals.values()}
        hosts = {held.value for held in self.recorder.host_inputs}
        found = [spreading.by_batch(value.shape) if value in hosts else
                 spreading.of(buffers.get(value, value.pattern), value.shape) for value in inputs]
        return found + [spreading.mesh.replicated] * (count - len(inputs))

    def _bytes(self, value: Any, sharding: Any) -> int:
        if self.spreading is None:
            return _bytes(value)
        return self.spreading.chip_bytes(sharding, value.shape, value.dtype.itemsize)

    def _leave(self, kept: Any, adopted: list[Any], grads: Any) -> None:
        """What the step leaves behind (optimizer state, gradients) stays, without memory."""
        for parameter, at, _ in grads:
            if at >= 0:
                adopted.append(parameter.grad.untyped_storage())
        self.left = bool(kept) or any(at >= 0 for _, at, _ in grads)
        for storage in [storage for storage, _ in kept] + adopted:
            value = storage._tpu_traced.value
            first = storage._tpu_traced.first
            storage._tpu_buffer = held = buffer.Buffer.uncounted(buffer.kind(value.shape, value.dtype))
            if self.spreading is not None:
                self.spreading.put(held, self.spreading.of(first.pattern, value.shape))
            del storage._tpu_traced
        for generator, state in self.recorder.states.values():
            generator.set_state(state)

    def _name(self, tensor: torch.Tensor) -> str:
        return self.known.get(id(buffer.of(tensor)), "a tensor of the function")

    def undo(self) -> None:
        """Everything is as before the capture."""
        self._undo()


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str,
          names: dict[int, str], modules: Iterable[torch.nn.Module] = (), spreading: Spreading | None = None,
          platform: str = "tpu", kind: type[_Trace] = _Trace) -> Program:
    """The program of a call.

    Args:
        function: what is called; reads and writes device tensors.
        names: of tensors, by the id of their buffers.
        modules: whose parts are named in the program.
        spreading: how tensors lie, for several chips.
        platform: what the program is for.
        kind: how the capture ends.

    Raises:
        CaptureError: the code does what no program can, or uses an operator that has no lowering.
    """
    dispatcher.load()
    flat, _ = pytree.tree_flatten((args, kwargs))
    begin = time.perf_counter()
    runs: list[_Trace] = []
    try:
        with context.targeting(platform, spreading is not None):
            # A first step may set up state (SGD's momentum): the program is that of the second, which finds it.
            while not runs or (runs[0].left and len(runs) < 2):
                run = kind(CompiledStep(function, name, {}, True), args, kwargs, flat, "")
                run.known, run.spreading, run.platform = names, spreading, platform
                run.naming = naming.Names(modules)
                traced: Any = run.go()
                runs.append(run)
    finally:
        for run in reversed(runs):
            run.undo()
    module, arguments, free = traced
    axes = dict(spreading.mesh.axes) if spreading is not None else {}
    return Program(name, module, arguments, time.perf_counter() - begin, axes, free)


def _bytes(value: Any) -> int:
    total = value.dtype.itemsize
    for size in value.shape:
        total *= size
    return total
