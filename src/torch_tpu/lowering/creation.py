"""Tensors made from numbers, and copies."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from ..runtime import dtypes
from . import promotion
from .table import lowering


def _default() -> np.dtype:
    return dtypes.to_numpy(torch.get_default_dtype())


def _number_dtype(*values: Any) -> np.dtype:
    """int64 when every number is an integer, else the default floating dtype."""
    return dtypes.to_numpy(promotion.result_dtype(*values))


@lowering("aten.copy.default")
def copy(self, src, non_blocking=False):
    return jnp.broadcast_to(promotion.cast(src, self.dtype), self.shape)


@lowering("aten.clone.default")
def clone(self):
    return self


@lowering("aten._to_copy.default", "prims.convert_element_type.default")
def to_copy(self, dtype=None):
    return self if dtype is None else promotion.cast(self, dtype)


@lowering("aten.fill.Scalar", "aten.fill.Tensor")
def fill(self, value):
    return jnp.full(self.shape, promotion.cast(value, self.dtype))


@lowering("aten.zero.default")
def zero(self):
    return jnp.zeros(self.shape, self.dtype)


@lowering("aten.full.default")
def full(size, fill_value, dtype=None):
    return jnp.full(size, promotion.cast(fill_value, _number_dtype(fill_value) if dtype is None else dtype))


@lowering("aten.full_like.default")
def full_like(self, fill_value, dtype=None):
    return jnp.full(self.shape, promotion.cast(fill_value, dtype or self.dtype))


@lowering("aten.new_full.default")
def new_full(self, size, fill_value, dtype=None):
    return jnp.full(size, promotion.cast(fill_value, dtype or self.dtype))


@lowering("aten.zeros.default", "aten.empty.memory_format", "aten._efficientzerotensor.default")
def zeros(size, dtype=None):
    return jnp.zeros(size, dtype or _default())


@lowering("aten.ones.default")
def ones(size, dtype=None):
    return jnp.ones(size, dtype or _default())


@lowering("aten.zeros_like.default", "aten.empty_like.default")
def zeros_like(self, dtype=None):
    return jnp.zeros(self.shape, dtype or self.dtype)


@lowering("aten.ones_like.default")
def ones_like(self, dtype=None):
    return jnp.ones(self.shape, dtype or self.dtype)


@lowering("aten.new_zeros.default", "aten.new_empty.default")
def new_zeros(self, size, dtype=None):
    return jnp.zeros(size, dtype or self.dtype)


@lowering("aten.new_ones.default")
def new_ones(self, size, dtype=None):
    return jnp.ones(size, dtype or self.dtype)


@lowering("aten.empty_strided.default", "aten.empty_permuted.default")
def empty_strided(size, stride, dtype=None):
    return jnp.zeros(size, dtype or _default())


@lowering("aten.new_empty_strided.default")
def new_empty_strided(self, size, stride, dtype=None):
    return jnp.zeros(size, dtype or self.dtype)


@lowering("aten.scalar_tensor.default")
def scalar_tensor(s, dtype=None):
    return promotion.cast(s, dtype or _default())


@lowering("aten.arange.default", static=("end",))
def arange(end, dtype=None):
    return arange_step(0, end, 1, dtype)


@lowering("aten.arange.start", static=("start", "end"))
def arange_start(start, end, dtype=None):
    return arange_step(start, end, 1, dtype)


@lowering("aten.arange.start_step", static=("start", "end", "step"))
def arange_step(start, end, step=1, dtype=None):
    kind = _number_dtype(start, end, step) if dtype is None else np.dtype(dtype)
    if all(isinstance(x, int) for x in (start, end, step)):
        count = max(0, -((start - end) // step))
        return (start + jnp.arange(count, dtype=jnp.int64) * step).astype(kind)
    count = max(0, int(np.ceil((end - start) / step)))
    # ATen accumulates in float64 for float64 results, and in float32 only on the device; the CPU's is followed.
    return promotion.cast(start + jnp.arange(count, dtype=jnp.float64) * step, kind)


@lowering("aten.range.default", static=("start", "end"))
def range_(start, end, dtype=None):
    return range_step(start, end, 1, dtype)


@lowering("aten.range.step", static=("start", "end", "step"))
def range_step(start, end, step=1, dtype=None):
    count = int(np.floor((end - start) / step)) + 1
    return promotion.cast(start + jnp.arange(count, dtype=jnp.float64) * step, dtype or _default())


def _spread_dtype(start: Any, end: Any, dtype: Any) -> np.dtype:
    return np.dtype(dtype) if dtype is not None else dtypes.to_numpy(
        torch.promote_types(promotion.result_dtype(start, end), torch.get_default_dtype()))


@lowering("aten.linspace.default", "aten.linspace.Tensor_Tensor", "aten.linspace.Tensor_Scalar",
          "aten.linspace.Scalar_Tensor")
def linspace(start, end, steps, dtype=None):
    kind = _spread_dtype(start, end, dtype)
    return promotion.cast(_spread(start, end, steps, kind), kind)


@lowering("aten.logspace.default", "aten.logspace.Tensor_Tensor", "aten.logspace.Tensor_Scalar",
          "aten.logspace.Scalar_Tensor")
def logspace(start, end, steps, base=10.0, dtype=None):
    kind = _spread_dtype(start, end, dtype)
    power = _spread(start, end, steps, kind)
    power = power if kind.kind == "c" else power.astype(jnp.float64)
    return promotion.cast(jnp.power(jnp.asarray(base, power.dtype), power), kind)


def _spread(start: Any, end: Any, steps: int, kind: np.dtype) -> Any:
    """From both ends to the middle, as ATen does, so that the last value is exact."""
    exact = kind.kind in "iub" or kind.itemsize == 8
    wide = kind if kind.kind == "c" else np.dtype(np.float64 if exact else np.float32)
    start, end = promotion.cast(start, wide), promotion.cast(end, wide)
    if kind.kind in "iu":
        start, end = jnp.trunc(start), jnp.trunc(end)
    if steps == 1:
        return start.reshape(1)
    index = jnp.arange(steps)
    # XLA would multiply by the reciprocal of a constant, and miss whole numbers.
    step = (end - start) / lax.optimization_barrier(jnp.asarray(steps - 1, wide))
    return jnp.where(index < steps // 2, start + step * index.astype(wide),
                     end - step * (steps - 1 - index).astype(wide))


@lowering("aten.eye.default")
def eye(n, dtype=None):
    return jnp.eye(n, dtype=dtype or _default())


@lowering("aten.eye.m")
def eye_m(n, m, dtype=None):
    return jnp.eye(n, m, dtype=dtype or _default())


@lowering("aten.tril.default")
def tril(self, diagonal=0):
    return jnp.tril(self, diagonal)


@lowering("aten.triu.default")
def triu(self, diagonal=0):
    return jnp.triu(self, diagonal)


@lowering("aten.tril_indices.default")
def tril_indices(row, col, offset=0, dtype=np.int64):
    return jnp.asarray(np.stack(np.nonzero(np.tri(row, col, offset, dtype=bool))).astype(dtype or np.int64))


@lowering("aten.triu_indices.default")
def triu_indices(row, col, offset=0, dtype=np.int64):
    return jnp.asarray(np.stack(np.nonzero(~np.tri(row, col, offset - 1, dtype=bool))).astype(dtype or np.int64))
