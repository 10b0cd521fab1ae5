"""Writing by index."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import promotion
from .axes import along, at_least_1d, corner, dim_of, grid, narrow, wrap
from .index import is_mask, nonzero_columns, positions
from .table import lowering


def add_at(self, where, values):
    """self[where] += values, with repeated positions added up: bool ors, narrow floats add in float32."""
    kind = self.dtype
    if kind == np.bool_:
        return self.at[where].max(values, mode="drop", wrap_negative_indices=False)
    wide = promotion.wide(self)
    return wide.at[where].add(promotion.cast(values, wide.dtype), mode="drop", wrap_negative_indices=False).astype(kind)


def _unmask(self, indices, values):
    """Masks as positions. How many a mask selects is unknown while tracing, so unused slots aim outside and drop."""
    result, slots = [], None
    for index in indices:
        if index is None or not is_mask(index):
            result.append(index)
            continue
        slots = math.prod(index.shape)
        if values.ndim and slots:
            # values of a masked write carry one element a selected position in the dimension the mask leaves
            free = self.ndim - len(result) - index.ndim
            at = values.ndim - 1 - free
            if at >= 0 and values.shape[at] != 1:
                slots = min(slots, values.shape[at])
        result += nonzero_columns(index != 0, slots)
    return result


@lowering("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(self, indices, values, accumulate=False):
    masks = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(masks) == 1 and is_mask(masks[0][1]) and values.size == 1 and not accumulate:
        at, mask = masks[0]
        mask = (mask != 0).reshape(mask.shape + (1,) * (self.ndim - at - mask.ndim))
        return jnp.where(mask, promotion.cast(values.reshape(()), self.dtype), self)
    where = positions(self, _unmask(self, indices, values))
    values = promotion.cast(values, self.dtype)
    if 0 in self.shape:
        return self
    shape = self.at[where].get(mode="clip").shape
    # torch drops leading dimensions of size one that the target does not have
    fitted = values.reshape(values.shape[max(values.ndim - len(shape), 0):]) if values.ndim > len(shape) else values
    if any(n not in (1, m) for n, m in zip(reversed(fitted.shape), reversed(shape))):
        raise RuntimeError(f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to "
                           f"indexing result of shape {list(shape)}")
    values = jnp.broadcast_to(fitted, shape)
    if accumulate:
        return add_at(self, where, values)
    return self.at[where].set(values, mode="drop", wrap_negative_indices=False)


@lowering("aten._index_put_impl.default")
def index_put_impl(self, indices, values, accumulate=False, unsafe=False):
    return index_put(self, indices, values, accumulate)


@lowering("aten._unsafe_masked_index_put_accumulate.default")
def unsafe_masked_index_put_accumulate(self, mask, indices, values):
    if self.size == 0:
        return self
    clipped = [None if i is None else jnp.clip(i, 0, self.shape[d] - 1) for d, i in enumerate(indices)]
    return index_put(self, clipped, jnp.where(mask, values, jnp.zeros((), values.dtype)), True)


@lowering("aten.index_copy.default")
def index_copy(self, dim, index, source):
    whole, where, source = _along(self, dim, index, source)
    return whole.at[where].set(source, mode="drop", wrap_negative_indices=False).reshape(self.shape)


def write_rows(self, source, start, dim):
    """self with the rows start, start + 1, ... along `dim` replaced by `source`: index_copy without a scatter. A write
    that reaches outside, where eager mode raises, leaves NaN. Leading dimensions of one stay out of the update, since
    XLA:CPU takes them from the operands of a product that reads the result, and copies it whole for that."""
    start, source = jnp.asarray(start).reshape(()), promotion.cast(source, self.dtype)
    place = jnp.clip(start, 0, self.shape[dim] - source.shape[dim])
    if jnp.issubdtype(self.dtype, jnp.inexact):
        source = jnp.where(place == start, source, jnp.nan)
    ones = next((d for d, n in enumerate(self.shape[:dim]) if n != 1), dim)
    written = lax.dynamic_update_slice_in_dim(self.reshape(self.shape[ones:]), source.reshape(source.shape[ones:]),
                                              place, dim - ones)
    return written.reshape(self.shape)


@lowering("aten.index_add.default")
def index_add(self, dim, index, source, alpha=1):
    whole, where, source = _along(self, dim, index, source)
    if not (isinstance(alpha, int) and alpha == 1):
        source = source & promotion.cast(alpha, source.dtype) if source.dtype == np.bool_ else \
            source * promotion.cast(alpha, source.dtype)
    return add_at(whole, where, source).reshape(self.shape)


def _along(self, dim, index, source):
    whole, index = at_least_1d(self), at_least_1d(index)
    dim = dim_of(dim, whole.ndim)
    shape = (*whole.shape[:dim], index.shape[0], *whole.shape[dim + 1:])
    return whole, along(dim, narrow(index, whole.shape[dim])), promotion.cast(source, self.dtype).reshape(shape)


@lowering("aten.put.default")
def put(self, index, source, accumulate=False):
    flat, where = self.reshape(-1), (wrap(index.reshape(-1), self.size),)
    source = promotion.cast(source, self.dtype).reshape(-1)
    changed = add_at(flat, where, source) if accumulate else \
        flat.at[where].set(source, mode="drop", wrap_negative_indices=False)
    return changed.reshape(self.shape)


def _spread(self, dim, index, src):
    """self, an indexing tuple and the values of a scatter along `dim`; src may be larger than index, or a number."""
    whole, index = at_least_1d(self), at_least_1d(index)
    dim = dim_of(dim, whole.ndim)
    where = grid(narrow(index, whole.shape[dim]), dim)
    if promotion.is_number(src):
        return whole, where, promotion.cast(src, self.dtype)
    return whole, where, promotion.cast(corner(at_least_1d(src), index.shape), self.dtype)


@lowering("aten.scatter.src", "aten.scatter.value")
def scatter(self, dim, index, src):
    if index.size == 0:
        return self
    whole, where, src = _spread(self, dim, index, src)
    return whole.at[where].set(src, mode="drop", wrap_negative_indices=False).reshape(self.shape)


@lowering("aten.scatter_add.default")
def scatter_add(self, dim, index, src):
    if index.size == 0:
        return self
    return add_at(*_spread(self, dim, index, src)).reshape(self.shape)


@lowering("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_with(self, dim, index, src, reduce):
    return scatter_reduce(self, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@lowering("aten.scatter_reduce.two")
def scatter_reduce(self, dim, index, src, reduce, include_self=True):
    if index.size == 0:
        return self
    return _reduce(_spread(self, dim, index, src), reduce, include_self).reshape(self.shape)


@lowering("aten.index_reduce.default")
def index_reduce(self, dim, index, source, reduce, include_self=True):
    if index.size == 0:
        return self
    return _reduce(_along(self, dim, index, source), reduce, include_self).reshape(self.shape)


def _reduce(write: tuple[Any, Any, Any], reduce: str, include_self: bool) -> Any:
    self, where, values = write
    kind = self.dtype
    if kind == np.bool_:
        if reduce == "mean":
            return _reduce((self.astype(jnp.int32), where, values.astype(jnp.int32)), reduce, include_self) != 0
        reduce = {"sum": "amax", "prod": "amin"}.get(reduce, reduce)
    if reduce in ("sum", "mean", "prod"):
        self, values = promotion.wide(self), promotion.wide(values)
    options: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}
    start = self if include_self else self.at[where].set(_identity(reduce, self.dtype), **options)
    if reduce == "prod":
        return start.at[where].multiply(values, **options).astype(kind)
    if reduce == "amax":
        return start.at[where].max(values, **options)
    if reduce == "amin":
        return start.at[where].min(values, **options)
    total = start.at[where].add(values, **options)
    if reduce == "sum":
        return total.astype(kind)
    count = jnp.full(self.shape, int(include_self), jnp.int32).at[where].add(1, **options)
    count = jnp.maximum(count, 1).astype(total.dtype)
    return (total // count if promotion.is_integral(total) else total / count).astype(kind)


def _identity(reduce, kind):
    kind = np.dtype(kind)
    if reduce in ("sum", "mean"):
        return jnp.zeros((), kind)
    if reduce == "prod":
        return jnp.ones((), kind)
    low = reduce == "amax"
    if kind == np.bool_:
        return jnp.asarray(not low)
    if kind.kind in "iu":
        info = jnp.iinfo(kind)
        return jnp.asarray(info.min if low else info.max, kind)
    return jnp.asarray(-np.inf if low else np.inf, kind)

