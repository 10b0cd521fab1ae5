"""Weights that lie in parts on the chips that also divide the batch (FSDP): stored in parts, used whole.

Left to itself, XLA computes with the parts, and exchanges activations of the whole batch. What FSDP means is that each
chip gathers a weight where it is used, works on its own part of the batch, and sums the gradient over the chips. An
optimizer's arithmetic, element by element, stays on the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import jax_door

_USES = {"dot_general", "conv_general_dilated", "gather", "ragged_dot", "ragged_dot_general"}


def replay(jaxpr: Any, arguments: Sequence[Any], whole: Mapping[int, Any]) -> list[Any]:
    """Inside a trace: the results of a traced function whose stored weights are gathered where they are used.

    Args:
        jaxpr: the traced function.
        arguments: its arguments.
        whole: for each stored weight, by its position, the sharding in which it is used.
    """
    inner = jaxpr.jaxpr
    values: dict[Any, Any] = dict(zip(inner.constvars, jaxpr.consts))
    values.update(zip(inner.invars, arguments))
    stored: dict[Any, Any] = {inner.invars[position]: sharding for position, sharding in whole.items()}

    def read(atom: Any) -> Any:
        return atom.val if jax_door.is_literal(atom) else values[atom]

    for equation in inner.eqns:
        mine = {atom: None for atom in equation.invars if not jax_door.is_literal(atom) and atom in stored}
        given = [read(atom) for atom in equation.invars]
        if mine:
            first = next(iter(mine))
            shape, sharding = first.aval.shape, stored[first]
            uses = _uses(equation, shape)
            # What meets the parts element by element and is none of them is the gradient: the sum over the chips.
            given = [jax_door.constrain(value, stored[atom] if uses else sharding)
                     if not jax_door.is_literal(atom) and (atom in mine) is uses and atom.aval.shape == shape
                     else value for atom, value in zip(equation.invars, given)]
            if not uses:
                stored.update(dict.fromkeys(equation.outvars, sharding))
        made = jax_door.bind(equation, given)
        values.update(zip(equation.outvars, made))
    return [read(atom) for atom in inner.outvars]


def _uses(equation: Any, shape: tuple[int, ...]) -> bool:
    """Whether an equation is more than arithmetic on the elements."""
    return any(out.aval.shape != shape for out in equation.outvars) or _contains(equation)


def _contains(equation: Any) -> bool:
    if equation.primitive.name in _USES:
        return True
    for value in equation.params.values():
        nested = getattr(value, "jaxpr", value)
        if hasattr(nested, "eqns") and any(map(_contains, nested.eqns)):
            return True
    return False
