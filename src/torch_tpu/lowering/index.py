"""Reading by index."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import promotion
from .axes import along, at_least_1d, corner, dim_of, index_dtype, narrow, wrap
from .table import lowering


def positions(self, indices):
    """Index tensors of index and index_put as a NumPy-style indexing tuple, negatives wrapped."""
    return tuple(slice(None) if index is None else wrap(index, self.shape[d]) for d, index in enumerate(indices))


def nonzero_columns(mask, size, fill=None):
    """Positions of the first `size` true elements, one int32/int64 column a dimension; past the last: `fill`, else
    the size of the dimension (which a scatter drops)."""
    total = math.prod(mask.shape)
    kind = index_dtype(total + 1)
    if size == 0 or total == 0:
        return [jnp.full((size,), n if fill is None else fill, kind) for n in mask.shape]
    flat = mask.reshape(-1)
    slot = jnp.cumsum(flat, dtype=kind) - 1
    # Every true element writes its own position into its slot; the others aim past the end and are dropped.
    found = jnp.full((size,), total, kind).at[jnp.where(flat, slot, size)].set(
        lax.iota(kind, total), mode="drop", unique_indices=False)
    columns, rest = [], found
    for n in reversed(mask.shape):
        columns.append(rest % n)
        rest = rest // n
    missing = found == total
    return [jnp.where(missing, n if fill is None else fill, column)
            for n, column in zip(mask.shape, reversed(columns))]


@lowering("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(self, indices):
    return self.at[positions(self, indices)].get(mode="clip", wrap_negative_indices=False)


@lowering("aten._unsafe_masked_index.default")
def unsafe_masked_index(self, mask, indices, fill):
    clipped = [None if i is None else jnp.clip(i, 0, self.shape[d] - 1) for d, i in enumerate(indices)]
    if 0 in self.shape:
        return jnp.full(self.at[positions(self, clipped)].get(mode="fill").shape, promotion.cast(fill, self.dtype))
    picked = index(self, clipped)
    return jnp.where(mask, picked, promotion.cast(fill, self.dtype))


@lowering("aten.index_select.default")
def index_select(self, dim, index):
    if self.ndim == 0:
        return self
    dim = dim_of(dim, self.ndim)
    return jnp.take(self, narrow(at_least_1d(index), self.shape[dim]), axis=dim, mode="clip")


@lowering("aten.gather.default")
def gather(self, dim, index, sparse_grad=False):
    if 0 in index.shape:
        return jnp.zeros(index.shape, self.dtype)
    dim, shape = dim_of(dim, self.ndim), index.shape
    self, index = at_least_1d(self), at_least_1d(index)
    index = narrow(index, self.shape[dim])
    picked = jnp.take_along_axis(corner(self, index.shape, dim), index, axis=dim, mode="clip")
    return picked.reshape(shape)


@lowering("aten.take.default")
def take(self, index):
    return jnp.take(self.reshape(-1), wrap(index, self.size), mode="clip")


@lowering("aten.nonzero_static.default")
def nonzero_static(self, size, fill_value=-1):
    columns = nonzero_columns(self != 0, size, fill_value)
    return jnp.stack(columns, 1) if columns else jnp.zeros((size, 0), jnp.int64)


@lowering("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(self, mask, value):
    return jnp.where(mask, promotion.cast(value, self.dtype), self)


@lowering("aten.masked_scatter.default")
def masked_scatter(self, mask, source):
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    self, mask = jnp.broadcast_to(self, shape), jnp.broadcast_to(mask, shape)
    if 0 in shape or source.size == 0:
        return self
    slot = jnp.cumsum(mask.reshape(-1), dtype=index_dtype(math.prod(shape))) - 1
    picked = jnp.take(source.reshape(-1), slot, mode="clip").reshape(shape)
    return jnp.where(mask, picked.astype(self.dtype), self)


@lowering("aten.masked_scatter_backward.default")
def masked_scatter_backward(grad_output, mask, sizes):
    count = math.prod(sizes)
    mask = jnp.broadcast_to(mask, grad_output.shape).reshape(-1)
    slot = jnp.cumsum(mask, dtype=index_dtype(max(mask.size, 1))) - 1
    result = jnp.zeros((count,), grad_output.dtype)
    return result.at[jnp.where(mask, slot, count)].set(grad_output.reshape(-1), mode="drop").reshape(tuple(sizes))


@lowering("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(self, dim, index, value):
    whole = at_least_1d(self)
    dim = dim_of(dim, whole.ndim)
    where = wrap(at_least_1d(index), whole.shape[dim])
    filled = whole.at[along(dim, where)].set(promotion.cast(value, self.dtype), mode="drop",
                                             wrap_negative_indices=False)
    return filled.reshape(self.shape)


def is_mask(index):
    """A bool (or, as torch still allows, uint8) index tensor selects elements."""
    return np.dtype(index.dtype) in (np.bool_, np.uint8)
