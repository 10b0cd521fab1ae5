"""Operators over lists of tensors: the table's own pointwise operators, one a tensor, in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from . import creation, pointwise, promotion, reduce, special  # noqa: F401  (they fill the table)
from .table import TABLE, lowering


def _of(name: str) -> Callable[..., Any]:
    return TABLE[f"aten.{name}"].fn


def _map(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn over each tensor; every other argument is a list of the same length, or the same for all."""

    def over(self: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        columns = [a if isinstance(a, list | tuple) else [a] * len(self) for a in args]
        return [fn(x, *row, **kwargs) for x, *row in zip(self, *columns)]

    return over


for _name in ("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac",
              "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign",
              "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "zero", "clone"):
    lowering(f"aten._foreach_{_name}.default")(_map(_of(f"{_name}.default")))

lowering("aten._foreach_copy.default")(_map(_of("copy.default")))

for _name, _fn in {"add": "add.Tensor", "sub": "sub.Tensor", "mul": "mul.Tensor", "div": "div.Tensor",
                   "maximum": "clamp_min.default", "minimum": "clamp_max.default", "clamp_min": "clamp_min.default",
                   "clamp_max": "clamp_max.default"}.items():
    lowering(f"aten._foreach_{_name}.Scalar", f"aten._foreach_{_name}.ScalarList",
             f"aten._foreach_{_name}.List")(_map(_of(_fn)))
for _name in ("add", "mul", "div"):
    lowering(f"aten._foreach_{_name}.Tensor")(_map(_of(f"{_name}.Tensor")))

lowering("aten._foreach_pow.Scalar", static=("exponent",))(_map(pointwise.pow_scalar))
lowering("aten._foreach_pow.List", "aten._foreach_pow.ScalarList")(_map(pointwise.pow_))
lowering("aten._foreach_lerp.List", "aten._foreach_lerp.Scalar", "aten._foreach_lerp.ScalarList")(
    _map(pointwise.lerp))


@lowering("aten._foreach_pow.ScalarAndTensor")
def scalar_pow(self, exponent):
    return [pointwise.pow_(self, e) for e in exponent]


def _ternary(fn: Callable[..., Any]) -> Callable[..., Any]:
    def over(self: list[Any], tensor1: list[Any], tensor2: list[Any], value: Any = 1) -> list[Any]:
        if not isinstance(value, list | tuple):
            value = [value] * len(self) if not getattr(value, "ndim", 0) else list(value)
        return [fn(*row) for row in zip(self, tensor1, tensor2, value)]

    return over


for _name in ("addcmul", "addcdiv"):
    lowering(f"aten._foreach_{_name}.Scalar", f"aten._foreach_{_name}.ScalarList",
             f"aten._foreach_{_name}.Tensor")(_ternary(_of(f"{_name}.default")))


@lowering("aten._foreach_norm.Scalar", static=("ord",))
def foreach_norm(self, ord=2, dtype=None):
    return [reduce.vector_norm(x, ord, dtype=dtype) if x.size else jnp.zeros((), x.dtype) for x in self]


@lowering("aten._foreach_powsum.Scalar", static=("ord",))
def foreach_powsum(self, ord=2, dtype=None):
    return [jnp.sum(jnp.power(jnp.abs(promotion.wide(x if dtype is None else promotion.cast(x, dtype))), ord))
            for x in self]


@lowering("aten._foreach_max.default")
def foreach_max(self):
    return [jnp.max(x) for x in self]


