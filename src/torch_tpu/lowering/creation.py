"""Tensors made from numbers, and copies."""

from __future__ import annotations

import jax.numpy as jnp

from . import promotion
from .table import lowering


@lowering("aten.copy.default")
def copy(self, src, non_blocking=False):
    return jnp.broadcast_to(promotion.cast(src, self.dtype), self.shape)


@lowering("aten.clone.default")
def clone(self):
    return self


@lowering("aten.fill.Scalar", "aten.fill.Tensor")
def fill(self, value):
    return jnp.full(self.shape, promotion.cast(value, self.dtype))


@lowering("aten.zero.default")
def zero(self):
    return jnp.zeros(self.shape, self.dtype)
