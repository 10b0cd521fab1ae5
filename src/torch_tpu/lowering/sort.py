"""Order: sort, top-k, order statistics, binary search. NaN is the greatest value, as in PyTorch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from . import dims, promotion
from .table import lowering


def sorted_pairs(self: Any, dim: int, descending: bool) -> tuple[Any, Any]:
    """Values and int64 indices, stable."""

    def run(x: Any, at: int) -> tuple[Any, Any]:
        index = lax.broadcasted_iota(jnp.int32 if x.shape[at] < 2**31 else jnp.int64, x.shape, at)
        if descending:  # flipped before and after, an ascending stable sort is a descending stable one
            x, index = jnp.flip(x, at), jnp.flip(index, at)
        values, index = lax.sort((x, index), dimension=at, is_stable=True, num_keys=1)
        if descending:
            values, index = jnp.flip(values, at), jnp.flip(index, at)
        return values, index.astype(jnp.int64)

    return dims.along(run)(self, dim)


@lowering("aten.sort.default")
def sort(self, dim=-1, descending=False):
    return sorted_pairs(self, dim, descending)


@lowering("aten.sort.stable")
def sort_stable(self, stable=None, dim=-1, descending=False):
    return sorted_pairs(self, dim, descending)


@lowering("aten.argsort.stable")
def argsort_stable(self, stable=None, dim=-1, descending=False):
    return sorted_pairs(self, dim, descending)[1]


@lowering("aten.topk.default")
def topk(self, k, dim=-1, largest=True, sorted=True):
    if self.ndim == 0:
        return (self, jnp.zeros((), jnp.int64)) if k else (self.reshape(1)[:0], jnp.zeros(0, jnp.int64))
    at = dim % self.ndim
    x = jnp.moveaxis(self, at, -1)
    _, index = lax.top_k(_rank(x, largest), k)
    index = index.astype(jnp.int64)
    return jnp.moveaxis(jnp.take_along_axis(x, index, -1), -1, at), jnp.moveaxis(index, -1, at)


def _rank(x: Any, largest: bool) -> Any:
    """Values whose greatest are the wanted ones. XLA orders floats totally: NaN above, -NaN below every number."""
    if promotion.is_integral(x):
        x = x.astype(jnp.int8) if x.dtype == bool else x
        return x if largest else ~x
    x = promotion.wide(x)
    x = jnp.where(x == 0, 0, x)  # -0 and 0 are equal
    return jnp.where(jnp.isnan(x), jnp.nan, x) if largest else jnp.where(jnp.isnan(x), -jnp.nan, -x)


def _pick(values: Any, indices: Any, rank: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """The values of one rank (a number, or one a row with size 1 along dim) of sorted pairs."""
    if values.ndim == 0:
        return values, indices
    at = dim % values.ndim
    shape = tuple(1 if i == at else n for i, n in enumerate(values.shape))
    rank = jnp.broadcast_to(rank, shape)
    picked = (jnp.take_along_axis(values, rank, at), jnp.take_along_axis(indices, rank, at))
    return picked if keepdim else (jnp.squeeze(picked[0], at), jnp.squeeze(picked[1], at))


@lowering("aten.kthvalue.default")
def kthvalue(self, k, dim=-1, keepdim=False):
    return _pick(*sorted_pairs(self, dim, False), k - 1, dim, keepdim)


@lowering("aten.median.dim")
def median_dim(self, dim, keepdim=False):
    values, indices = sorted_pairs(self, dim, False)
    if self.ndim == 0:
        return values, indices
    size = self.shape[dim % self.ndim]
    nans = jnp.sum(values != values, dim, keepdims=True)
    # One NaN makes the median NaN: the first of them, which the sort puts behind all numbers.
    return _pick(values, indices, jnp.where(nans > 0, size - nans, (size - 1) // 2), dim, keepdim)


@lowering("aten.nanmedian.dim")
def nanmedian_dim(self, dim, keepdim=False):
    values, indices = sorted_pairs(self, dim, False)
    if self.ndim == 0:
        return values, indices
    numbers = jnp.sum(values == values, dim, keepdims=True)
    return _pick(values, indices, jnp.maximum(numbers - 1, 0) // 2, dim, keepdim)


def _empty_median(self: Any) -> Any:
    return jnp.zeros((), self.dtype) if promotion.is_integral(self) else jnp.full((), jnp.nan, self.dtype)


@lowering("aten.median.default")
def median(self):
    return median_dim(self.reshape(-1), 0)[0] if self.size else _empty_median(self)


@lowering("aten.nanmedian.default")
def nanmedian(self):
    return nanmedian_dim(self.reshape(-1), 0)[0] if self.size else _empty_median(self)


@lowering("aten.mode.default")
def mode(self, dim=-1, keepdim=False):
    """The smallest of the most frequent values, and its last index."""
    values, indices = sorted_pairs(self, dim, False)
    if self.ndim == 0:
        return values, indices
    at = dim % self.ndim
    place = lax.broadcasted_iota(jnp.int64, values.shape, at)
    begins = jnp.where(place == 0, True, values != jnp.roll(values, 1, at))
    begin = lax.cummax(jnp.where(begins, place, 0), axis=at)
    last = jnp.argmax(place - begin, axis=at, keepdims=True)
    return _pick(values, indices, last, dim, keepdim)


def _search(sequence: Any, values: Any, right: bool, out_int32: bool) -> Any:
    """Positions in sorted rows: counts by bisection, with NaN the greatest."""
    sequence, values = promotion.promote(sequence, values)
    size = sequence.shape[-1]
    low = jnp.zeros(values.shape, jnp.int32)
    high = jnp.full(values.shape, size, jnp.int32)
    if size:
        for _ in range(int(size).bit_length()):
            middle = (low + high) // 2
            at = jnp.minimum(middle, size - 1)
            probe = jnp.take(sequence, at, axis=0) if sequence.ndim == 1 else jnp.take_along_axis(sequence, at, -1)
            # Goes right while the probe is before the value: !(probe >= v), or !(probe > v).
            go = (low < high) & ~((probe > values) if right else (probe >= values))
            low, high = jnp.where(go, middle + 1, low), jnp.where((low < high) & ~go, middle, high)
    return low if out_int32 else low.astype(jnp.int64)


@lowering("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(sorted_sequence, self, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1)
    values = self if hasattr(self, "shape") else jnp.asarray(self)
    if sorted_sequence.ndim > 1 and values.ndim == 0:
        values = jnp.broadcast_to(values, (*sorted_sequence.shape[:-1], 1))
    return _search(sorted_sequence, values, right or side == "right", out_int32)


@lowering("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(self, boundaries, out_int32=False, right=False):
    return _search(boundaries, self if hasattr(self, "shape") else jnp.asarray(self), right, out_int32)
