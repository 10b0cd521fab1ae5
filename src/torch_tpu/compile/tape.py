"""The operators of a captured step in the order in which they ran, over values that are written once; and the program
they make. It knows nothing of who owns which value: see step.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..distributed import graph as collectives
from ..distributed.captured import Collective
from ..eager.plan import Plan
from ..lowering import context, promotion, strided, table
from ..runtime import dtypes, errors, executable, jax_door
from ..tensor import buffer
from . import symbol, tape_rewrite


class Value:
    """An array as it is at one moment. `maker`: the entry that computes it; without one it is an input, a constant
    (`literal`), or memory that nobody has written (`blank`). `pattern`: the buffer that such memory was made like."""

    __slots__ = ("blank", "dtype", "literal", "maker", "number", "pattern", "shape")

    def __init__(self, shape: Sequence[int], dtype: np.dtype, maker: Entry | None = None, literal: Any = None,
                 blank: bool = False, number: bool = False) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.maker = maker
        self.literal = literal
        self.blank = blank
        self.number = number  # a Python number, which promotes weakly
        self.pattern: Any = None


@dataclass(frozen=True)
class Read:
    """A tensor argument: a window on a value."""

    value: Value
    view: strided.View
    dtype: np.dtype


@dataclass(frozen=True)
class Written:
    """Where an operator's result goes: into a window of a value."""

    value: Value
    view: strided.View
    dtype: np.dtype


@dataclass(frozen=True)
class Fresh:
    """A result that is a new tensor: its shape, its dtype, and the order of its dimensions in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    order: tuple[int, ...]


@dataclass
class Entry:
    """One operator. `positional` and `named` hold Read, numbers, symbolic expressions (Symbolic) and lists of them."""

    name: str
    lowering: table.Lowering | None
    positional: list[Any]
    named: dict[str, Any]
    where: str
    key: int | None = None
    pick: list[tuple[Any, Fresh | Written]] = field(default_factory=list)  # which result, and what becomes of it
    made: list[Value] = field(default_factory=list)
    select: bool = False  # keeps the old value (second argument) where the first is true, else takes the third
    collective: Collective | None = None  # instead of a lowering
    scope: str = ""  # a name for what it computes, in the program's metadata

    def reads(self) -> list[Read]:
        found: list[Read] = []
        _collect([self.positional, list(self.named.values())], found)
        return found

    def sources(self) -> list[Value]:
        return [read.value for read in self.reads()] + [
            target.value for _, target in self.pick if isinstance(target, Written)]

    def constant(self) -> bool:
        """Whether it computes the same at every step."""
        return not self.sources() and self.key is None and self.collective is None \
            and not _symbolic([self.positional, list(self.named.values())])


@dataclass(frozen=True)
class Symbolic:
    """A number that is an input of the program or computed in it."""

    expression: symbol.Expression


def _collect(value: Any, found: list[Read]) -> None:
    if isinstance(value, Read):
        found.append(value)
    elif isinstance(value, Symbolic):
        found += symbol.items(value.expression)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)


def _symbolic(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_symbolic(item) for item in value)
    return isinstance(value, Symbolic)


def results(plan_returns: int, result: Any) -> list[Any]:
    """A lowering's results as a list, one an output of the schema."""
    if plan_returns == 1 and isinstance(result, list):
        return [list(result)]
    return list(result) if isinstance(result, tuple | list) else [result]


def call(entry: Entry, tensor: Callable[[Read], Any], number: Callable[[Symbolic], Any], keys: Any,
         scope: collectives.Scope | None = None) -> Any:
    """Calls the lowering, or the collective in the scope of its program."""
    if entry.collective is not None:
        return entry.collective.run(scope, *map(tensor, entry.positional))

    def real(value: Any) -> Any:
        if isinstance(value, Read):
            return tensor(value)
        if isinstance(value, Symbolic):
            return number(value)
        if isinstance(value, list | tuple):
            return [real(item) for item in value]
        return value

    named = {name: real(value) for name, value in entry.named.items()}
    if entry.key is not None:
        named["key"] = keys[entry.key]
    assert entry.lowering is not None
    return entry.lowering.fn(*(real(value) for value in entry.positional), **named)


def arguments(plan: Plan, given: dict[str, Any], convert: Callable[[Any, str], Any]) -> tuple[list[Any],
                                                                                             dict[str, Any]]:
    """The functional overload's arguments, each through `convert(value, kind)`."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument, (name, kind) in zip(plan.functional._schema.arguments, plan.params):
        if kind == "placement" or name in table.PLACEMENT:
            continue
        if name in given:
            value = convert(given[name], kind)
        else:
            value = argument.default_value if argument.has_default_value() else None
            if name == "dtype" and isinstance(value, int):
                value = torch.int64
        if isinstance(value, torch.dtype):
            value = dtypes.to_numpy(value)
        if argument.kwarg_only:
            named[name] = value
        else:
            positional.append(value)
    return positional, named


@dataclass
class Program:
    """What runs a step: an executable, its inputs in order, and its outputs."""

    executable: executable.Executable
    inputs: list[Value]
    updated: list[int]  # which inputs the first outputs are the new values of
    donated: list[int]
    scope: collectives.Scope | None  # the processes that run it together, if it has collectives
    name: str

    def run(self, arrays: list[Any]) -> list[Any]:
        """Its outputs. With collectives it is watched, as these are."""
        if self.scope is None:
            return self.executable(arrays)
        return collectives.launch(self.scope, self.name, self.executable, arrays)


def _scope(entries: Sequence[Entry]) -> collectives.Scope | None:
    try:
        return collectives.scope_of(entry.collective.group for entry in entries if entry.collective is not None)
    except NotImplementedError as error:
        raise errors.CaptureError(str(error)) from error


class Tape:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.keys = 0

    def build(self, updated: list[tuple[Value, Value]], outputs: list[Value], adopted: set[Value], numbers: list[Any],
              name: str, xla: dict[str, Any], donate: bool, cache: dict[str, Any], cause: str = "",
              make: Callable[..., Any] = executable.build) -> Program:
        """Makes the program.

        Args:
            updated: (input value, its value after the step) of memory that the step writes.
            outputs: further values to give out.
            adopted: constants to take as inputs instead of computing them (state that later steps find there).
            numbers: the numbers that are inputs.
            cache: executables by what they compute.
            cause: why it is compiled, for the statistics.
            make: what makes the executable; takes the arguments of runtime.executable.build.
        """
        alive: set[int] = set()
        wanted = {id(value) for _, value in updated} | {id(value) for value in outputs}
        recorded = [tape_rewrite.better(entry) for entry in self.entries]
        unread: list[Value] = []  # what a collective gives that this rank does not need, and others wait for it
        for entry in reversed(recorded):
            read = any(id(value) in wanted for value in entry.made)
            if entry.collective is not None and not read:
                unread += entry.made[:1]
            if (read or entry.collective is not None) and not all(v in adopted for v in entry.made):
                alive.add(id(entry))
                wanted |= {id(value) for value in entry.sources()}
        entries = [entry for entry in recorded if id(entry) in alive]
        inputs: dict[Value, None] = {}
        literals: dict[Value, None] = {}

        def note(value: Value) -> None:
            if value in adopted:
                inputs[value] = None
            elif value.maker is None and not value.blank:
                (literals if value.literal is not None else inputs)[value] = None

        for entry in entries:
            for value in entry.sources():
                note(value)
        for before, _ in updated:
            note(before)
        for value in [after for _, after in updated] + outputs:
            note(value)
        order = list(inputs)
        at = {value: position for position, value in enumerate(order)}
        updated = sorted(updated, key=lambda pair: at[pair[0]])  # the order of capture depends on who owns the memory
        donated = [at[before] for before, _ in updated] if donate else []
        finals = [after for _, after in updated] + outputs
        scope = _scope(entries)
        text = self._text(entries, order, literals, finals, donated, numbers)
        signature = hashlib.sha256(text.encode()).hexdigest()
        found = cache.get(signature)
        if found is None:
            avals = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in order]
            avals += [jax.ShapeDtypeStruct((), np.dtype(type(number)), weak_type=True) for _, number in numbers]
            if self.keys:
                avals.append(jax.ShapeDtypeStruct((self.keys, 2), np.uint32))
            found = cache[signature] = make(
                self._function(entries, order, numbers, finals, scope, unread), avals, name, sorted(set(donated)), xla,
                graph=True, replicas=collectives.replicas(scope), cause=cause,
                pins=lambda: [(number, at[before]) for number, (before, _) in enumerate(updated)])
        return Program(found, order, [at[before] for before, _ in updated], donated, scope, name)

    def _function(self, entries: list[Entry], inputs: list[Value], numbers: list[Any],
                  finals: list[Value], scope: collectives.Scope | None,
                  unread: Sequence[Value] = ()) -> Callable[..., list[Any]]:
        @context.program()
        def program(*arrays: Any) -> list[Any]:
            at: dict[Value, Any] = dict(zip(inputs, arrays))
            given = {which: array for (which, _), array in zip(numbers, arrays[len(inputs):])}
            keys = arrays[-1] if self.keys else None

            def array(value: Value) -> Any:
                found = at.get(value)
                if found is None:
                    if value.literal is not None:
                        found = at[value] = jnp.asarray(value.literal)
                    elif value.blank:
                        found = at[value] = jnp.zeros(value.shape, value.dtype)
                    else:
                        raise AssertionError("a value is used before it is computed")
                return found

            def tensor(read: Read) -> Any:
                return strided.read(array(read.value), read.view, read.dtype)

            def leaf(expression: symbol.Expression) -> Any:
                if expression[0] == "number":
                    return given[expression[1]]
                value = tensor(expression[1])
                kind = float if jnp.issubdtype(value.dtype, jnp.floating) else int
                return value if value.dtype == np.bool_ else jax_door.weak(value.reshape(()), kind)

            def number(value: Symbolic) -> Any:
                return symbol.evaluate(value.expression, leaf, True)

            for entry in entries:
                try:
                    with jax.named_scope(entry.scope) if entry.scope else nullcontext():
                        self._run(entry, at, array, tensor, number, keys, scope)
                except (TypeError, ValueError, IndexError, NotImplementedError) as error:
                    raise RuntimeError(f"lowering {entry.name}, called at {entry.where}, failed: "
                                       f"{type(error).__name__}: {error}") from error
            return [array(value) for value in finals] + [array(value).reshape(-1)[:1] for value in unread]

        return program

    @staticmethod
    def _run(entry: Entry, at: dict[Value, Any], array: Callable[[Value], Any], tensor: Callable[[Read], Any],
             number: Callable[[Symbolic], Any], keys: Any, scope: collectives.Scope | None) -> None:
        if entry.select:
            condition, old, new = (tensor(read) for read in entry.positional)
            at[entry.made[0]] = jnp.where(condition.reshape(()) != 0, old, new)
            return
        result = call(entry, tensor, number, keys, scope)
        for (which, target), value in zip(entry.pick, entry.made):
            part = result
            for index in which:
                part = part[index]
            if part is None:
                raise ValueError("the lowering gives no result where PyTorch has one")
            if isinstance(target, Fresh):
                part = promotion.cast(part, target.dtype)
                if tuple(part.shape) != target.shape:
                    raise ValueError(f"the lowering gives shape {tuple(part.shape)}, PyTorch says {target.shape}")
                at[value] = part.transpose(target.order) if target.order != tuple(range(part.ndim)) else part
            else:
                part = promotion.cast(part, target.dtype)
                if part.shape != target.view.sizes:
                    part = jnp.broadcast_to(part, target.view.sizes)
                at[value] = strided.write(array(target.value), target.view, part)

    def _text(self, entries: list[Entry], inputs: list[Value], literals: dict[Value, None], finals: list[Value],
              donated: list[int], numbers: list[Any]) -> str:
        """What the program computes, in words that do not depend on which objects it was captured from."""
        names: dict[int, str] = {}
        lines: list[str] = [repr((donated, [type(number).__name__ for _, number in numbers], self.keys,
                                  torch.get_float32_matmul_precision(), torch.get_default_dtype()))]
        given = set(inputs)
        number_at = {which: position for position, (which, _) in enumerate(numbers)}

        def name(value: Value) -> str:
            found = names.get(id(value))
            if found is None:
                found = names[id(value)] = f"v{len(names)}"
                if value.blank and value not in given:
                    lines.append(f"{found} blank {value.shape} {value.dtype}")
            return found

        def shown(value: Any) -> Any:
            if isinstance(value, Read | Written):
                return name(value.value), value.view, str(value.dtype)
            if isinstance(value, Symbolic):
                return expressed(value.expression)
            if isinstance(value, list | tuple):
                return [shown(item) for item in value]
            return value

        def expressed(at: symbol.Expression) -> Any:
            if at[0] == "item":
                return "item", shown(at[1])
            if at[0] == "number":
                return "number", number_at[at[1]]
            return tuple(expressed(part) if isinstance(part, tuple) else part for part in at)

        for value in inputs:
            lines.append(f"{name(value)} {value.shape} {value.dtype}")
        for value in literals:
            digest = hashlib.sha256(np.ascontiguousarray(value.literal).tobytes()).hexdigest()
            lines.append(f"{name(value)} {value.shape} {value.dtype} {digest}")
        for entry in entries:
            lines.append(repr((entry.name, shown(entry.positional), [(k, shown(v)) for k, v in entry.named.items()],
                               entry.key, [(which, shown(target)) for which, target in entry.pick],
                               [name(value) for value in entry.made])))
        lines.append(repr([name(value) for value in finals]))
        return "\n".join(lines)


def fresh(shape: Sequence[int], strides: Sequence[int], dtype: np.dtype) -> tuple[Fresh, tuple[int, ...],
                                                                                  tuple[int, ...]]:
    """How a new tensor with these strides is stored: (the result, the stored shape, the strides it really gets)."""
    shape, strides = tuple(shape), tuple(strides)
    order = buffer.dense_order(shape, strides) if 0 not in shape else None
    if order is None:
        order, strides = tuple(range(len(shape))), buffer.contiguous(shape)
    return Fresh(shape, dtype, order), tuple(shape[d] for d in order), strides
