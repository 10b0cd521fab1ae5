"""Elementwise operators."""

from __future__ import annotations

import jax.numpy as jnp

from . import promotion
from .table import lowering


@lowering("aten.add.Tensor", "aten.add.Scalar")
def add(self, other, alpha=1):
    dtype = promotion.result_dtype(self, other)
    a, b = promotion.cast(self, dtype), promotion.cast(other, dtype)
    if isinstance(alpha, int) and alpha == 1:
        return a | b if a.dtype == bool else a + b
    return a + b * promotion.cast(alpha, dtype)


@lowering("aten.abs.default")
def abs_(self):
    return jnp.abs(self)
