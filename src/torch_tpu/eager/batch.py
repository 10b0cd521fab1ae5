"""Fused eager mode: operators are recorded and run later, many as one executable.

A recorded operator is a node: a traced function from arrays to arrays. Tensors, views and in-place writes need no care
here: a `Buffer` whose data are not computed yet holds a `Pending`, and every reader asks the buffer. A batch ends when
somebody needs an array (printing, `.item()`, a copy to the host, a compiled graph), at `LIMIT` nodes, and before a
program that takes over memory a node still needs.

The first time a sequence of operators is seen, its operators run one by one, from their own executables. The second
time it is compiled as one program, which gives only what somebody still holds; so a sequence that never repeats costs
no compilation.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ..runtime import config, executable, memory
from ..tensor import buffer
from ..tensor.buffer import Pending

# Operators. The device begins with the first part of a long sequence (30 layers have some 1,100) while Python records
# the next.
LIMIT = 256

on = config.EAGER.choice("strict", "fused") == "fused"

_lock = threading.RLock()
_current: Batch | None = None
_seen: set[int] = set()  # hashes of sequences that ran once
_fused: dict[Any, executable.Executable] = {}


class Node:
    """What a recorded operator computes: its function, and the executable of its own once it ran alone.

    Attributes:
        kinds: of its outputs.
        donated: positions of arguments that it writes.
    """

    __slots__ = ("_program", "_recorded", "donated", "jaxpr", "kinds", "name", "outputs")

    def __init__(self, recorded: executable.Recorded, name: str, donated: Sequence[int]) -> None:
        self._recorded: executable.Recorded | None = recorded
        self._program: executable.Executable | None = None
        self.jaxpr = recorded.jaxpr
        self.kinds = [buffer.kind(tuple(result.shape), np.dtype(result.dtype)) for result in recorded.results]
        self.outputs = range(len(self.kinds))
        self.name = name
        self.donated = frozenset(donated)

    @property
    def missing(self) -> bool:
        """Whether it has no executable yet."""
        return self._program is None

    def program(self) -> executable.Executable:
        """Its own executable, compiled at the first use."""
        if self._program is None:
            assert self._recorded is not None
            self._program = self._recorded.compile()
            self._recorded = None
        return self._program

    def release(self) -> None:
        """Lets go of the function it was traced from, which holds tensors."""
        if self._recorded is not None:
            self._recorded.release()


class Batch:
    """Operators recorded since the last run."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.wires: list[tuple[Any, ...]] = []  # per node and argument: (node, output), or the number of an input
        self.inputs: list[Any] = []
        self.known: dict[int, int] = {}
        self.pending: list[weakref.ref[Pending]] = []
        self.written: set[int] = set()  # inputs whose buffers have newer data
        self.bytes = 0  # of inputs, which the batch keeps alive

    def add(self, node: Node, buffers: Sequence[buffer.Buffer], extra: Sequence[Any]) -> list[Pending]:
        wires: list[Any] = []
        known, inputs = self.known, self.inputs
        for position, held in enumerate(buffers):
            array: Any = held._array
            if array.__class__ is Pending and array.batch is self:
                wires.append(array.wire)
                continue
            array = held.array()
            number = known.get(id(array))
            if number is None:
                number = known[id(array)] = len(inputs)
                inputs.append(array)
                self.bytes += held.kind.nbytes
            wires.append(number)
            if position in node.donated:
                self.written.add(number)
        for array in extra:
            number = known.get(id(array))
            if number is None:
                number = known[id(array)] = len(inputs)
                inputs.append(array)
            wires.append(number)
        number = len(self.nodes)
        self.nodes.append(node)
        self.wires.append(tuple(wires))
        made = [Pending(self, (number, output)) for output in node.outputs]
        self.pending += map(weakref.ref, made)
        return made

    def run(self) -> None:
        """Computes what somebody still holds."""
        global _current
        with _lock:
            if _current is self:
                _current = None
                executable.wait_for(None)
            if not self.nodes:
                return
            alive = [each for ref in self.pending if (each := ref()) is not None]
            live = tuple(each.wire for each in alive)
            nodes, wires, inputs = self.nodes, self.wires, self.inputs
            self.nodes, self.wires, self.inputs, self.pending = [], [], [], []
            try:
                arrays = _launch(nodes, wires, inputs, live, tuple(sorted(self.written)))
            except Exception as error:
                for each in alive:
                    each.batch = _Failed(error)
                raise
            for each, array in zip(alive, arrays):
                each.array, each.batch = array, None


class _Failed:
    """In place of the batch of an array that could not be computed: every use says so again."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self) -> None:
        raise self.error


def _launch(nodes: list[Node], wires: list[tuple[Any, ...]], inputs: list[Any], live: tuple[tuple[int, int], ...],
            donated: tuple[int, ...]) -> list[Any]:
    if not live:
        return []
    key = (tuple(nodes), tuple(wires), live, donated)
    program = _fused.get(key)
    if program is None:
        if len(nodes) == 1 or hash(key) not in _seen:
            _seen.add(hash(key))
            return _one_by_one(nodes, wires, inputs, live)
        program = _fused[key] = _compile(nodes, wires, inputs, live, donated)
    return program(inputs)


def _one_by_one(nodes: list[Node], wires: list[tuple[Any, ...]], inputs: list[Any],
                live: tuple[tuple[int, int], ...]) -> list[Any]:
    last = {}  # the node after which a value is needed no more
    for number, arguments in enumerate(wires):
        for wire in arguments:
            last[wire] = number
    last.update(dict.fromkeys(live, len(nodes)))
    values: dict[Any, Any] = dict(enumerate(inputs))
    inputs.clear()
    _make_programs(nodes)
    for number, (node, arguments) in enumerate(zip(nodes, wires)):
        outputs = node.program()([values[wire] for wire in arguments])
        for wire in arguments:
            if last[wire] == number:
                values.pop(wire, None)
        for output, array in enumerate(outputs):
            if (number, output) in last:
                values[number, output] = array
    return [values[wire] for wire in live]


def _make_programs(nodes: list[Node]) -> None:
    """Compiles the operators that have not run yet, on all cores."""
    missing = [node for node in dict.fromkeys(nodes) if node.missing]
    if len(missing) < 2:
        return
    with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1), "compile") as pool:
        list(pool.map(Node.program, missing))


def _compile(nodes: list[Node], wires: list[tuple[Any, ...]], inputs: list[Any], live: tuple[tuple[int, int], ...],
             donated: tuple[int, ...]) -> executable.Executable:
    from ..runtime import jax_door

    def program(*arrays: Any) -> list[Any]:
        values: dict[Any, Any] = dict(enumerate(arrays))
        for number, (node, arguments) in enumerate(zip(nodes, wires)):
            for output, value in enumerate(jax_door.replay(node.jaxpr, [values[wire] for wire in arguments])):
                values[number, output] = value
        return [values[wire] for wire in live]

    avals = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in inputs]
    name = f"eager batch of {len(nodes)}: {nodes[0].name} .. {nodes[-1].name}"
    return executable.build(program, avals, name, donated, graph=True)


def record(node: Node, buffers: Sequence[buffer.Buffer], extra: Sequence[Any]) -> list[Pending]:
    """Adds an operator; returns what stands for its outputs.

    Args:
        node: what it computes.
        buffers: its tensors' memory.
        extra: its other arguments: arrays of numbers and of a random key.
    """
    global _current
    with _lock:
        batch = _current
        if batch is None:
            batch = _current = Batch()
            executable.wait_for(run)
        made = batch.add(node, buffers, extra)
        if len(batch.nodes) >= LIMIT or batch.bytes > memory.limit() // 2:
            batch.run()
        return made


def run() -> None:
    """Runs what is recorded."""
    batch = _current
    if batch is not None:
        batch.run()


def mode() -> str:
    return "fused" if on else "strict"


def set_mode(mode: str) -> str:
    """"fused" or "strict"; returns the mode before. What is recorded runs first.

    Raises:
        ValueError: for another mode.
    """
    global on
    if mode not in ("fused", "strict"):
        raise ValueError(f"eager mode {mode!r} is not known: 'strict' runs every operator at once, 'fused' records "
                         "operators and runs them together when a result is needed")
    before = "fused" if on else "strict"
    run()
    on = mode == "fused"
    return before


def clear() -> None:
    """Forgets the compiled batches of this process."""
    run()
    _seen.clear()
    _fused.clear()
