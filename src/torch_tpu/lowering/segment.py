"""Reductions over runs of rows, and repetition by counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import promotion
from .axes import index_dtype
from .table import lowering


def _segments(data, lengths, offsets, axis):
    """Which segment each row along `axis` belongs to (the number of segments: none), and the lengths."""
    if offsets is not None:
        lengths = jnp.diff(offsets, axis=axis)
        starts = offsets
    else:
        starts = jnp.cumsum(lengths, axis=axis)
        starts = jnp.concatenate([jnp.zeros_like(starts[..., :1]), starts], -1)
    n = data.shape[axis]
    rows = jnp.arange(n, dtype=index_dtype(n + 1))
    starts = starts.astype(rows.dtype)

    def one(start):
        place = jnp.searchsorted(start, rows, side="right") - 1
        return jnp.where(place < 0, start.shape[0] - 1, place)

    for _ in range(axis):
        one = jax.vmap(one)
    return one(starts), lengths


@lowering("aten.segment_reduce.default", static=("initial",))
def segment_reduce(data, reduce, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    axis %= data.ndim
    segment, lengths = _segments(data, lengths, offsets, axis)
    count = lengths.shape[axis]
    wide = promotion.wide(data)
    empty = {"sum": 0, "mean": 0, "prod": 1, "max": -jnp.inf, "min": jnp.inf}[reduce]
    start = empty if initial is None else initial

    def one(values, segment):
        held = jnp.full((count, *values.shape[1:]), start, values.dtype).at[segment]
        if reduce in ("sum", "mean"):
            return held.add(values, mode="drop")
        return {"prod": held.multiply, "max": held.max, "min": held.min}[reduce](values, mode="drop")

    for _ in range(axis):
        one = jax.vmap(one)
    result = one(wide, segment)
    if reduce == "mean":
        size = lengths.reshape(lengths.shape + (1,) * (data.ndim - lengths.ndim)).astype(result.dtype)
        # an empty segment is nan, unless an initial value stands for it
        result = jnp.where(size > 0, result / jnp.maximum(size, 1), jnp.nan if initial is None else result)
    return result.astype(data.dtype)


@lowering("aten._segment_reduce_backward.default", static=("initial",))
def segment_reduce_backward(grad, output, data, reduce, lengths=None, offsets=None, axis=0, initial=None):
    axis %= data.ndim
    segment, lengths = _segments(data, lengths, offsets, axis)
    count = lengths.shape[axis]
    grad, output, wide = promotion.wide(grad), promotion.wide(output), promotion.wide(data)

    def one(grad, output, values, segment, lengths):
        inside = (segment < count).reshape((-1,) + (1,) * (values.ndim - 1))
        arrived = jnp.where(inside, jnp.take(grad, segment, axis=0, mode="clip"), 0)
        if reduce == "sum":
            return arrived
        if reduce == "mean":
            size = jnp.take(lengths, segment, mode="clip").astype(grad.dtype)
            return arrived / size.reshape((-1,) + (1,) * (values.ndim - 1))
        made = jnp.take(output, segment, axis=0, mode="clip")
        if reduce == "prod":
            return arrived * _others(values, segment, count, 1 if initial is None else initial)
        wins = inside & ((values == made) | (jnp.isnan(values) & jnp.isnan(made)))
        ties = jnp.zeros(grad.shape, grad.dtype).at[segment].add(wins.astype(grad.dtype), mode="drop")
        return jnp.where(wins, arrived / jnp.take(ties, segment, axis=0, mode="clip"), 0)

    for _ in range(axis):
        one = jax.vmap(one)
    return one(grad, output, wide, segment, lengths).astype(data.dtype)


def _others(values, segment, count, initial):
    """For each row the product of the other rows of its segment; correct where some are zero."""
    zero = values == 0
    shape = (count, *values.shape[1:])
    zeros = jnp.zeros(shape, jnp.int32).at[segment].add(zero.astype(jnp.int32), mode="drop")
    product = jnp.full(shape, initial, values.dtype).at[segment].multiply(jnp.where(zero, 1, values), mode="drop")
    zeros = jnp.take(zeros, segment, axis=0, mode="clip")
    product = jnp.take(product, segment, axis=0, mode="clip")
    return jnp.where(zeros == 0, product / jnp.where(zero, 1, values), jnp.where(zero & (zeros == 1), product, 0))


@lowering("aten.repeat_interleave.Tensor")
def repeat_interleave(repeats, output_size=None):
    if output_size is None:
        raise ValueError("repeat_interleave needs output_size where the size of its result must be known")
    n = repeats.shape[0]
    if n == 0 or output_size == 0:
        return jnp.zeros((output_size,), repeats.dtype)
    return jnp.repeat(jnp.arange(n, dtype=repeats.dtype), repeats, total_repeat_length=output_size)
