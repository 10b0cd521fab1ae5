"""Python numbers that a compiled step takes as inputs (a learning rate) or computes (`loss.item()`).

torch.SymFloat and torch.SymInt carry them through torch's Python and C++ code to the operators; behind them stands a
node of ours that records arithmetic. Where Python needs the number itself, one with a value at hand (a learning rate)
becomes an assumption that every later call checks, and one that the device has yet to compute is an error.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from ..runtime import errors, jax_door

# name -> (the function on Python numbers, the function on JAX values, kind of the result or None: the operands')
_BINARY: dict[str, tuple[Callable[..., Any], Callable[..., Any], str | None]] = {
    "add": (operator.add, operator.add, None), "sub": (operator.sub, operator.sub, None),
    "mul": (operator.mul, operator.mul, None), "mod": (operator.mod, operator.mod, None),
    "pow": (operator.pow, operator.pow, None), "pow_by_natural": (operator.pow, operator.pow, None),
    "float_pow": (operator.pow, operator.pow, "float"), "truediv": (operator.truediv, operator.truediv, "float"),
    "float_truediv": (operator.truediv, operator.truediv, "float"),
    "int_truediv": (operator.truediv, operator.truediv, "float"),
    "floordiv": (operator.floordiv, operator.floordiv, None),
    "int_floordiv": (operator.floordiv, operator.floordiv, "int"),
    "sym_min": (min, jnp.minimum, None), "sym_max": (max, jnp.maximum, None),
    "eq": (operator.eq, operator.eq, "bool"), "ne": (operator.ne, operator.ne, "bool"),
    "lt": (operator.lt, operator.lt, "bool"), "le": (operator.le, operator.le, "bool"),
    "gt": (operator.gt, operator.gt, "bool"), "ge": (operator.ge, operator.ge, "bool"),
    "and": (operator.and_, operator.and_, None), "or": (operator.or_, operator.or_, None),
}
_UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Any], str | None]] = {
    "neg": (operator.neg, operator.neg, None), "pos": (operator.pos, operator.pos, None),
    "abs": (abs, abs, None), "sym_not": (operator.not_, jnp.logical_not, "bool"),
    "sym_float": (float, lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else jax_door.weak(x, float), "float"),
    "floor": (math.floor, jnp.floor, "int"), "ceil": (math.ceil, jnp.ceil, "int"),
    "trunc": (math.trunc, jnp.trunc, "int"), "sqrt": (math.sqrt, jnp.sqrt, "float"),
    "exp": (math.exp, jnp.exp, "float"), "log": (math.log, jnp.log, "float"),
}
_ALL = {**_BINARY, **_UNARY}

Expression = tuple[Any, ...]  # ("number", which), ("item", read), ("constant", value) or (name, operands ...)


class Node:
    """What torch calls a SymNode: an expression, its kind, and its value where Python knows it."""

    def __init__(self, expression: Expression, kind: str, hint: Any, assume: Callable[[Expression, Any], None]) -> None:
        self.expression = expression
        self.kind = kind
        self.hint = hint
        self.assume = assume

    def is_int(self) -> bool:
        return self.kind == "int"

    def is_float(self) -> bool:
        return self.kind == "float"

    def is_bool(self) -> bool:
        return self.kind == "bool"

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return self.hint is not None

    def _constant(self, value: Any) -> Node:
        kind = type(value).__name__
        return Node(("constant", value), kind, value, self.assume)

    wrap_float = wrap_int = wrap_bool = _constant

    def _decide(self) -> Any:
        if self.hint is None:
            raise errors.CaptureError(
                "a value that the step computes on the device is needed as a Python number (by an `if`, float(), a "
                "size, a print); keep it a tensor: torch.where, tensor arithmetic, or return it and look at it outside")
        self.assume(self.expression, self.hint)
        return self.hint

    def guard_float(self, *_: Any) -> float:
        return float(self._decide())

    def guard_int(self, *_: Any) -> int:
        return int(self._decide())

    def guard_bool(self, *_: Any) -> bool:
        return bool(self._decide())

    def bool_(self) -> bool:
        return bool(self._decide())

    def int_(self) -> int:
        return int(self._decide())

    def guard_size_oblivious(self, *_: Any) -> bool:
        return bool(self._decide())

    def expect_true(self, *_: Any) -> bool:
        """A check that Python makes on the way, of a base that must not be negative for one."""
        return True if self.hint is None else bool(self._decide())

    def maybe_as_int(self) -> None:
        return None

    def _graph_repr(self) -> str:
        return f"{self._decide()}"

    __str__ = __repr__ = _graph_repr


def _enter_binary(name: str) -> None:
    compute, _, kind = _BINARY[name]

    def method(self: Node, other: Node) -> Node:
        hint = None if self.hint is None or other.hint is None else compute(self.hint, other.hint)
        made = kind or ("float" if "float" in (self.kind, other.kind) else self.kind)
        return Node((name, self.expression, other.expression), made, hint, self.assume)

    setattr(Node, name, method)
    if name in ("and", "or"):
        setattr(Node, name + "_", method)


def _enter_unary(name: str) -> None:
    compute, _, kind = _UNARY[name]

    def method(self: Node, *_: Any) -> Node:
        hint = None if self.hint is None else compute(self.hint)
        return Node((name, self.expression), kind or self.kind, hint, self.assume)

    setattr(Node, name, method)
    setattr(Node, f"sym_{name}" if not name.startswith("sym_") else name, method)


for _name in _BINARY:
    _enter_binary(_name)
for _name in _UNARY:
    _enter_unary(_name)


def wrap(node: Node) -> Any:
    """The torch number over a node."""
    return {"float": torch.SymFloat, "int": torch.SymInt, "bool": torch.SymBool}[node.kind](node)


def expression(value: Any) -> Expression | None:
    """The expression of one of our numbers; None for anything else."""
    if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool) and isinstance(value.node, Node):
        return value.node.expression
    return None


def hint(value: Any) -> Any:
    """A number of the same kind, for code that looks at its kind only."""
    return value.node.hint if value.node.hint is not None else {"float": 1.0, "int": 1, "bool": True}[value.node.kind]


def evaluate(at: Expression, leaf: Callable[[Expression], Any], on_device: bool) -> Any:
    """The value of an expression; `leaf` gives those of numbers and items."""
    name, *operands = at
    if name == "constant":
        return operands[0]
    if name in ("number", "item"):
        return leaf(at)
    values = [evaluate(operand, leaf, on_device) for operand in operands]
    if not any(hasattr(value, "dtype") for value in values):
        on_device = False
    compute, lowered, _ = _ALL[name]
    return lowered(*values) if on_device else compute(*values)


def items(at: Expression) -> list[Any]:
    """The device reads inside an expression."""
    if at[0] == "item":
        return [at[1]]
    if at[0] in ("constant", "number"):
        return []
    return [read for operand in at[1:] for read in items(operand)]


def mapped(at: Expression, item: Callable[[Any], Any]) -> Expression:
    """The expression with every device read replaced."""
    if at[0] == "item":
        return ("item", item(at[1]))
    if at[0] in ("constant", "number"):
        return at
    return (at[0], *(mapped(operand, item) for operand in at[1:]))
