"""Comparisons, logic and bits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from . import promotion
from .table import lowering


def _compared(fn):
    return lambda self, other: fn(*promotion.promote(self, other))


def _logical(fn):
    return lambda self, other: fn(self != 0, other != 0)


for _name, _fn in {"eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater,
                   "ge": jnp.greater_equal}.items():
    lowering(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_compared(_fn))
for _name, _fn in {"and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor}.items():
    lowering(f"aten.bitwise_{_name}.Tensor", f"aten.bitwise_{_name}.Scalar",
             f"aten.bitwise_{_name}.Scalar_Tensor")(_compared(_fn))
for _name, _fn in {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}.items():
    lowering(f"aten.logical_{_name}.default")(_logical(_fn))


@lowering("aten.bitwise_left_shift.Tensor", "aten.bitwise_left_shift.Tensor_Scalar",
          "aten.bitwise_left_shift.Scalar_Tensor", "aten.__lshift__.Tensor", "aten.__lshift__.Scalar")
def left_shift(self, other):
    a, b = promotion.promote(self, other)
    if not promotion.is_integral(a):
        return a * jnp.exp2(b)
    bits = np.dtype(a.dtype).itemsize * 8
    outside = (b < 0) | (b >= bits)
    return jnp.where(outside, 0, jnp.left_shift(a, jnp.where(outside, 0, b)))


@lowering("aten.bitwise_right_shift.Tensor", "aten.bitwise_right_shift.Tensor_Scalar",
          "aten.bitwise_right_shift.Scalar_Tensor", "aten.__rshift__.Tensor", "aten.__rshift__.Scalar")
def right_shift(self, other):
    a, b = promotion.promote(self, other)
    if not promotion.is_integral(a):
        return a / jnp.exp2(b)
    kind = np.dtype(a.dtype)
    bits = kind.itemsize * 8
    outside = (b < 0) | (b >= bits)
    if kind.kind == "u":
        return jnp.where(outside, 0, jnp.right_shift(a, jnp.where(outside, 0, b)))
    return jnp.right_shift(a, jnp.where(outside, bits - 1, b))




@lowering("aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar", "aten.isin.Scalar_Tensor")
def isin(elements, test_elements, assume_unique=False, invert=False):
    a, b = promotion.promote(elements, test_elements)
    found = jnp.isin(a, b)
    return ~found if invert else found
