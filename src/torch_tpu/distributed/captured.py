"""Collectives that are recorded for a program instead of running (torch.tpu.compile_step, captured forward)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from .graph import Scope

Tensor = torch.Tensor


@dataclass(frozen=True)
class Collective:
    """A collective of a program.

    Attributes:
        group: its process group.
        text: what it does, with all that distinguishes it from others.
        run: from the program's scope and one JAX value an input to one JAX value an output.
    """

    group: Any
    text: str
    run: Callable[..., Sequence[Any]]


class Recorder(Protocol):
    """What records a program."""

    def collective(self, what: Collective, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Takes a collective that writes the outputs."""

    def outside(self) -> AbstractContextManager[None]:
        """A context in which it records nothing."""


class _Recording(threading.local):
    recorder: Recorder | None = None


_now = _Recording()


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Gives the collectives of this thread to the recorder instead of running them; None runs them."""
    before, _now.recorder = _now.recorder, recorder
    try:
        yield
    finally:
        _now.recorder = before


def on() -> bool:
    return _now.recorder is not None


@contextmanager
def outside() -> Iterator[None]:
    """What is done here is done at once, and is no part of a program."""
    recorder = _now.recorder
    if recorder is None:
        yield
        return
    with recorder.outside(), recording(None):
        yield


def record(group: Any, name: str, body: Callable[..., Sequence[Any]], static: tuple[Any, ...],
           inputs: Sequence[Tensor], outputs: Sequence[Tensor], extra: Sequence[Any]) -> None:
    """Records a collective of a process group, which computes `body(*inputs, *extra, groups)`.

    Args:
        group: the process group.
        name: of the collective.
        body: takes JAX values and the members of the group, gives the outputs' values.
        static: what `body` depends on besides.
        inputs: tensors.
        outputs: tensors to write.
        extra: arrays of this process.
    """
    constants = [np.asarray(array) for array in extra]
    shapes = [tuple(output.shape) for output in outputs]

    def run(where: Scope, *arrays: Any) -> list[Any]:
        results = where.in_order(arrays, lambda *given: list(body(*given, *constants, where.of(group.group_name))))
        return [result.reshape(shape) for result, shape in zip(results, shapes)]

    assert _now.recorder is not None
    _now.recorder.collective(Collective(group, f"{name}{static} {constants} of {group.ranks}", run), inputs, outputs)


def functional(func: Any, args: Sequence[Any]) -> Collective | None:
    """What an operator of `_c10d_functional` does with its first argument; None where a program cannot do it."""
    from . import graph  # with JAX, which must not be loaded with torch

    found = graph.lowered(str(func), args)
    if found is None:
        return None
    group, run = found
    rest = tuple(args[1:])  # not the tensor: a tape must not keep tensors alive
    return Collective(group, f"{func}{rest[:-1]} of {group.ranks}",
                      lambda where, x: [where.in_order([x], lambda given: run(where, given, *rest))])
