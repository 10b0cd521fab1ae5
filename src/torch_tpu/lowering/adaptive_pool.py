"""Pooling whose windows are given by the output size (adaptive, fractional), and unpooling."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from . import context
from .pool import lowest, scatter_back
from .promotion import wide
from .table import lowering
from .windows import each


def _bounds(size, count):
    i = np.arange(count)
    return i * size // max(count, 1), -(-(i + 1) * size // max(count, 1))


def _mean_matrix(size, count):
    start, end = _bounds(size, count)
    position = np.arange(size)
    inside = (position >= start[:, None]) & (position < end[:, None])
    return inside / np.maximum(end - start, 1)[:, None]


def _adaptive_avg(x, output_size):
    rank = len(output_size)
    for axis, count in zip(range(x.ndim - rank, x.ndim), output_size):
        size = x.shape[axis]
        if count and size % count == 0:
            x = x.reshape(*x.shape[:axis], count, size // count, *x.shape[axis + 1:]).mean(axis + 1)
        else:
            matrix = jnp.asarray(_mean_matrix(size, count), x.dtype)
            x = jnp.moveaxis(jnp.tensordot(x, matrix, ((axis,), (1,)), precision=context.precision()), -1, axis)
    return x


@lowering("aten._adaptive_avg_pool2d.default")
def adaptive_avg_pool2d(self, output_size):
    return _adaptive_avg(wide(self), each(output_size, 2)).astype(self.dtype)


@lowering("aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool3d(self, output_size):
    return _adaptive_avg(wide(self), each(output_size, 3)).astype(self.dtype)


def _adaptive_avg_backward(grad, self, rank):
    size = grad.shape[grad.ndim - rank:]
    grad_ = wide(grad)
    pull = jax.linear_transpose(lambda x: _adaptive_avg(x, size), jax.ShapeDtypeStruct(self.shape, grad_.dtype))
    return pull(grad_)[0].astype(self.dtype)


@lowering("aten._adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward(grad_output, self):
    return _adaptive_avg_backward(grad_output, self, 2)


@lowering("aten._adaptive_avg_pool3d_backward.default")
def adaptive_avg_pool3d_backward(grad_output, self):
    return _adaptive_avg_backward(grad_output, self, 3)


def _best(values, index, rank):
    """Maximum and its index over the last `rank` dimensions of values; index broadcasts against values."""
    lead = values.shape[:values.ndim - rank]
    index = jnp.broadcast_to(index, values.shape).reshape(*lead, -1)
    values = values.reshape(*lead, -1)
    at = jnp.argmax(values, -1, keepdims=True)
    best, at = (jnp.take_along_axis(v, at, -1)[..., 0] for v in (values, index))
    return best, at.astype(jnp.int64)


@lowering("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def adaptive_max_pool(self, output_size):
    rank = len(output_size)
    lead = self.ndim - rank
    values, flat, inside = self, jnp.zeros((), jnp.int32), jnp.ones((), bool)
    for d, count in enumerate(output_size):
        size = self.shape[lead + d]
        start, end = _bounds(size, count)
        width = int((end - start).max(initial=1))
        position = start[:, None] + np.arange(width)
        clipped = np.minimum(position, size - 1)
        values = jnp.take(values, jnp.asarray(clipped.reshape(-1), jnp.int32), axis=lead + 2 * d)
        values = values.reshape(*values.shape[:lead + 2 * d], count, width, *values.shape[lead + 2 * d + 1:])
        shape = [1] * (2 * rank)
        shape[2 * d], shape[2 * d + 1] = count, width
        flat = flat * size + jnp.asarray(clipped, jnp.int32).reshape(shape)
        inside = inside & jnp.asarray(position < end[:, None]).reshape(shape)
    values = jnp.where(inside, values, jnp.asarray(lowest(values.dtype), values.dtype))
    order = [*range(lead), *(lead + 2 * d for d in range(rank)), *(lead + 2 * d + 1 for d in range(rank))]
    flat = jnp.broadcast_to(flat, values.shape[lead:]).transpose([i - lead for i in order[lead:]])
    return _best(values.transpose(order), flat, rank)


@lowering("aten.adaptive_max_pool2d_backward.default")
def adaptive_max_pool2d_backward(grad_output, self, indices):
    return scatter_back(grad_output, self.shape, indices, 2)


@lowering("aten.adaptive_max_pool3d_backward.default")
def adaptive_max_pool3d_backward(grad_output, self, indices):
    return scatter_back(grad_output, self.shape, indices, 3)


def _fractional_starts(sample, size, count, kernel):
    """(N, C, count) first positions, PyTorch's sequence for one uniform number per plane."""
    last = size - kernel
    if count == 1:
        return jnp.full((*sample.shape, 1), last, jnp.int32)
    alpha = jnp.asarray((size - kernel) / (count - 1), sample.dtype)
    i = jnp.arange(count, dtype=sample.dtype)
    starts = ((i + sample[..., None]) * alpha).astype(jnp.int32) - (sample[..., None] * alpha).astype(jnp.int32)
    return starts.at[..., -1].set(last)


def _fractional(x, kernel, output_size, samples):
    rank = len(kernel)
    if 0 in x.shape:
        shape = (*x.shape[:x.ndim - rank], *output_size)
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, jnp.int64)
    batched = x if x.ndim == rank + 2 else x[None]
    sizes = batched.shape[2:]
    values, flat = batched, jnp.zeros((1,) * (2 + 2 * rank), jnp.int32)
    for d in range(rank):
        # The samples name width first.
        column = d if rank == 3 else rank - 1 - d
        starts = _fractional_starts(wide(samples)[..., column], sizes[d], output_size[d], kernel[d])
        position = starts[..., None] + jnp.arange(kernel[d], dtype=jnp.int32)
        axis = 2 + 2 * d
        spread = [*position.shape[:2]] + [1] * (values.ndim - 2)
        spread[axis] = position.shape[2] * position.shape[3]
        values = jnp.take_along_axis(values, position.reshape(spread), axis=axis)
        values = values.reshape(*values.shape[:axis], output_size[d], kernel[d], *values.shape[axis + 1:])
        spread = [*position.shape[:2]] + [1] * (2 * rank)
        spread[axis], spread[axis + 1] = position.shape[2:]
        flat = flat * sizes[d] + position.reshape(spread)
    order = [0, 1, *(2 + 2 * d for d in range(rank)), *(3 + 2 * d for d in range(rank))]
    flat = jnp.broadcast_to(flat, values.shape)
    best, at = _best(values.transpose(order), flat.transpose(order), rank)
    return (best, at) if x.ndim == rank + 2 else (best[0], at[0])


@lowering("aten.fractional_max_pool2d.default")
def fractional_max_pool2d(self, kernel_size, output_size, random_samples):
    return _fractional(self, each(kernel_size, 2), each(output_size, 2), random_samples)


@lowering("aten.fractional_max_pool3d.default")
def fractional_max_pool3d(self, kernel_size, output_size, random_samples):
    return _fractional(self, each(kernel_size, 3), each(output_size, 3), random_samples)


@lowering("aten.fractional_max_pool2d_backward.default")
def fractional_max_pool2d_backward(grad_output, self, kernel_size, output_size, indices):
    return scatter_back(grad_output, self.shape, indices, 2)


@lowering("aten.fractional_max_pool3d_backward.default")
def fractional_max_pool3d_backward(grad_output, self, kernel_size, output_size, indices):
    return scatter_back(grad_output, self.shape, indices, 3)


def _unpool(x, indices, output_size, rank):
    if 0 in x.shape:
        return jnp.zeros((*x.shape[:x.ndim - rank], *output_size), x.dtype)
    planes = math.prod(x.shape[:x.ndim - rank])
    flat = jnp.zeros((planes, math.prod(output_size)), x.dtype)
    flat = flat.at[jnp.arange(planes)[:, None], indices.reshape(planes, -1)].set(x.reshape(planes, -1))
    return flat.reshape(*x.shape[:x.ndim - rank], *output_size)


@lowering("aten.max_unpool2d.default")
def max_unpool2d(self, indices, output_size):
    return _unpool(self, indices, each(output_size, 2), 2)


@lowering("aten.max_unpool3d.default")
def max_unpool3d(self, indices, output_size, stride, padding):
    return _unpool(self, indices, each(output_size, 3), 3)
