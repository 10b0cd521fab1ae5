"""What running one ATen overload means: which lowering computes it, and which arguments it writes.

In-place and out= overloads have no lowering of their own: they run the functional twin's, and write the results into
the arguments. So one line in the table serves add, add_, and add.out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..lowering import table

OpOverload = torch._ops.OpOverload

# Twins that names do not tell. Value: the functional overload, and (argument, result) pairs that are written.
_TWINS: dict[str, tuple[str, tuple[tuple[str, int], ...]]] = {
    "aten.native_batch_norm.default": (
        "aten._native_batch_norm_legit_functional.default", (("running_mean", 3), ("running_var", 4))),
}


@dataclass(frozen=True)
class Plan:
    """How to run an overload through the table.

    Attributes:
        params: (name, kind) of the functional overload's arguments; kind is "tensor", "tensors", "traced" (a number
            that becomes an argument of the program), "static" or "placement".
        writes: (argument name, result index) pairs.
        fresh: indices of results that are new tensors.
        returns: for each returned value, ("fresh", result index) or ("argument", name).
        defaults: values of arguments that only the overload, not the functional one, lets a caller leave out.
        slots: for each of params its position in the overload's own arguments (or one past all), name, kind and
            default (MISSING for none).
    """

    op: OpOverload
    functional: OpOverload
    entry: table.Lowering
    params: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    writes: tuple[tuple[str, int], ...]
    fresh: tuple[int, ...]
    returns: tuple[tuple[str, Any], ...]
    out: bool
    defaults: tuple[tuple[str, Any], ...]
    slots: tuple[tuple[int, str, str, Any], ...]

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arguments it writes."""
        return tuple(name for name, _ in self.writes)


MISSING: Any = object()  # an argument the caller left out


def _is_write(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _alias(value: Any) -> tuple[str, ...]:
    return tuple(sorted(value.alias_info.before_set))


def mutable_arguments(op: OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if _is_write(a)]


def overload(name: str) -> OpOverload:
    """The OpOverload of a full name ("aten.add.Tensor")."""
    namespace, packet, which = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which)


@functools.cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """The overload that computes what an in-place or out= overload computes, as new tensors."""
    schema = op._schema
    name = str(op)
    if name in _TWINS:
        return overload(_TWINS[name][0])
    packet_name = name.split(".")[1]
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    stems = [packet_name]
    if packet_name.endswith("_") and not packet_name.endswith("__"):
        stems = [packet_name[:-1], packet_name[:-1] + "_functional"]
    elif packet_name.startswith("__i") and packet_name.endswith("__"):
        stems = ["__" + packet_name[3:]]
    else:
        stems.append(packet_name + "_functional")
    for stem in stems:
        packet = getattr(getattr(torch.ops, op.namespace), stem, None)
        if packet is None:
            continue
        for which in packet.overloads():
            candidate = getattr(packet, which)
            if candidate is op or mutable_arguments(candidate):
                continue
            have = [(a.name, str(a.type)) for a in candidate._schema.arguments if a.name != "generator"]
            if have == [w for w in wanted if w[0] != "generator"]:
                return candidate
    return None


def _kind(argument: Any, entry: table.Lowering) -> str:
    name, text = argument.name, str(argument.type)
    if name in table.PLACEMENT:
        return "placement"
    if "Tensor" in text:
        return "tensors" if "List" in text or "[]" in text else "tensor"
    if name in entry.traced:
        return "traced"
    if text in ("number", "Scalar", "Optional[number]", "Optional[Scalar]") and name not in entry.static:
        return "traced"
    if "number" in text and "List" in text and name not in entry.static:
        return "traced_list"
    return "static"


@functools.cache
def make(op: OpOverload) -> Plan | None:
    """The plan of an overload; None when the table does not reach it."""
    if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
        return None  # a view: eager tensors share storage, only compiled graphs use its lowering
    if torch.Tag.inplace_view in op.tags:
        return None  # changes sizes and strides, not data
    mutable = mutable_arguments(op)
    name = str(op)
    manual = _TWINS.get(name)
    functional = op if not mutable and manual is None else functional_twin(op)
    if functional is None:
        return None
    entry = table.find(str(functional))
    if entry is None:
        return None
    schema = op._schema
    results = len(functional._schema.returns)
    if manual is not None:
        writes = manual[1]
        fresh = tuple(range(len(schema.returns)))
    else:
        first = results - len(mutable)
        if first < 0:
            return None
        # A functional twin gives what is returned first, then what it would have changed in its arguments.
        outs = {a.name for a in schema.arguments if a.is_out}
        ordered = sorted(mutable, key=lambda argument: argument not in outs)
        writes = tuple((argument, first + i) for i, argument in enumerate(ordered))
        fresh = tuple(range(first))
    aliases = {_alias(a): a.name for a in schema.arguments if _is_write(a)}
    returns: list[tuple[str, Any]] = []
    position = 0
    for value in schema.returns:
        if value.alias_info is not None and value.alias_info.is_write:
            returns.append(("argument", aliases[_alias(value)]))
        else:
            returns.append(("fresh", position))
            position += 1
    if position > len(fresh):
        return None
    params = tuple((a.name, _kind(a, entry)) for a in functional._schema.arguments)
    names = tuple(a.name for a in schema.arguments)
    defaults = _own_defaults(op, functional)
    positions = {name: i for i, name in enumerate(names)}
    slots = tuple((positions.get(name, len(names)), name, kind, dict(defaults).get(name, MISSING))
                  for name, kind in params if kind != "placement" or name == "memory_format")
    return Plan(op, functional, entry, params, names, writes, fresh, tuple(returns),
                any(a.is_out for a in schema.arguments), defaults, slots)


def _own_defaults(op: OpOverload, functional: OpOverload) -> tuple[tuple[str, Any], ...]:
    required = {a.name for a in functional._schema.arguments if not a.has_default_value()}
    return tuple((a.name, a.default_value) for a in op._schema.arguments
                 if a.has_default_value() and a.name in required)
