"""Max and average pooling over 1 to 3 dimensions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from .promotion import wide
from .table import lowering
from .windows import Windows


def lowest(dtype):
    """The value that never wins a maximum."""
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def beats(value, best):
    """PyTorch's rule: the first of equal values, the last NaN."""
    wins = value > best
    return wins | jnp.isnan(value) if jnp.issubdtype(value.dtype, jnp.floating) else wins


def _max_pool(x, windows):
    """One dimension after the other, last first: the order of comparisons is PyTorch's, with far fewer of them."""
    rank = len(windows.kernel)
    # A window's first position inside the input: what is returned when nothing beats minus infinity.
    first = [np.where(s < 0, s + (-s + d - 1) // d * d, s) for s, d in zip(windows.starts(), windows.dilation)]
    index = jnp.zeros(x.shape, jnp.int32)
    for axis in reversed(range(rank)):
        one = windows.along(axis, x.shape)
        padded, padded_index = one.pad(x, lowest(x.dtype)), one.pad(index, 0)
        start, step = windows.starts()[axis], math.prod(windows.sizes[axis + 1:])
        lead = (*x.shape[:x.ndim - rank], *one.out)
        x = jnp.full(lead, lowest(x.dtype), x.dtype)
        index = jnp.broadcast_to(_steps(first, windows, axis), lead)
        for offset in one.offsets():
            value = one.at(padded, offset)
            wins = beats(value, x)
            position = start + offset[axis] * windows.dilation[axis]
            shape = [-1 if i == axis else 1 for i in range(rank)]
            at = one.at(padded_index, offset) + jnp.asarray(position * step, jnp.int32).reshape(shape)
            x, index = jnp.where(wins, value, x), jnp.where(wins, at, index)
    return x, index.astype(jnp.int64)


def _steps(first, windows, axis):
    """Flat index of each window's first position, over dimensions from `axis` on."""
    index = jnp.zeros((1,) * len(first), jnp.int32)
    for d in range(axis, len(first)):
        shape = [-1 if i == d else 1 for i in range(len(first))]
        index = index + jnp.asarray(first[d] * math.prod(windows.sizes[d + 1:]), jnp.int32).reshape(shape)
    return index


def scatter_back(grad_output, shape, indices, rank):
    """Adds each gradient to the element its index names, plane by plane."""
    if 0 in shape:
        return jnp.zeros(shape, grad_output.dtype)
    planes = math.prod(shape[:len(shape) - rank])
    grad = wide(grad_output).reshape(planes, -1)
    flat = jnp.zeros((planes, math.prod(shape[len(shape) - rank:])), grad.dtype)
    flat = flat.at[jnp.arange(planes)[:, None], indices.reshape(planes, -1)].add(grad)
    return flat.reshape(shape).astype(grad_output.dtype)


def _max_pool_backward(grad, shape, windows, indices):
    if math.prod(windows.kernel) > 64:
        return scatter_back(grad, shape, indices, len(windows.kernel))
    starts = windows.starts()
    indices = indices.astype(jnp.int32)
    total = 0
    g = wide(grad)
    for offset in windows.offsets():
        position = windows.flat([s + i * d for s, i, d in zip(starts, offset, windows.dilation)])
        total = total + windows.place(jnp.where(indices == position, g, jnp.zeros((), g.dtype)), offset)
    return windows.crop(total).astype(grad.dtype)


@lowering("aten.max_pool2d_with_indices.default")
def max_pool2d(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    return _max_pool(self, Windows.make(self.shape, 2, kernel_size, stride, padding, dilation, ceil_mode))


@lowering("aten.max_pool3d_with_indices.default")
def max_pool3d(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    return _max_pool(self, Windows.make(self.shape, 3, kernel_size, stride, padding, dilation, ceil_mode))


@lowering("aten.max_pool2d_with_indices_backward.default")
def max_pool2d_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    windows = Windows.make(self.shape, 2, kernel_size, stride, padding, dilation, ceil_mode)
    return _max_pool_backward(grad_output, self.shape, windows, indices)


@lowering("aten.max_pool3d_with_indices_backward.default")
def max_pool3d_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    windows = Windows.make(self.shape, 3, kernel_size, stride, padding, dilation, ceil_mode)
    return _max_pool_backward(grad_output, self.shape, windows, indices)


def _divisor(windows, count_include_pad, divisor_override):
    """How many elements each window counts, as an array of shape `out`, or a number."""
    if divisor_override:
        return divisor_override
    count = np.ones((), np.int64)
    for start, n, k, p in zip(windows.starts(), windows.sizes, windows.kernel, windows.padding):
        end = np.minimum(start + k, n + p)
        if not count_include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, n)
        count = count[..., None] * (end - start)
    return count


def _divide(total, divisor):
    if jnp.issubdtype(total.dtype, jnp.integer):
        return lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, total.dtype), total.shape))
    return total / jnp.asarray(divisor, total.dtype)


def _avg_pool(x, windows, count_include_pad, divisor_override):
    total = wide(x)
    for axis in range(len(windows.kernel)):
        one = windows.along(axis, total.shape)
        padded = one.pad(total, 0)
        total = sum(one.at(padded, offset) for offset in one.offsets())
    return _divide(total, _divisor(windows, count_include_pad, divisor_override)).astype(x.dtype)


def _avg_pool_backward(grad, windows, count_include_pad, divisor_override):
    total = _divide(wide(grad), _divisor(windows, count_include_pad, divisor_override))
    for axis in range(len(windows.kernel)):
        shape = [*windows.sizes[:axis + 1], *windows.out[axis + 1:]]
        one = windows.along(axis, shape)
        total = one.crop(sum(one.place(total, offset) for offset in one.offsets()))
    return total.astype(grad.dtype)


@lowering("aten.avg_pool2d.default")
def avg_pool2d(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True,
               divisor_override=None):
    windows = Windows.make(self.shape, 2, kernel_size, stride, padding, 1, ceil_mode)
    return _avg_pool(self, windows, count_include_pad, divisor_override)


@lowering("aten.avg_pool3d.default")
def avg_pool3d(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True,
               divisor_override=None):
    windows = Windows.make(self.shape, 3, kernel_size, stride, padding, 1, ceil_mode)
    return _avg_pool(self, windows, count_include_pad, divisor_override)


@lowering("aten.avg_pool2d_backward.default")
def avg_pool2d_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad,
                        divisor_override):
    windows = Windows.make(self.shape, 2, kernel_size, stride, padding, 1, ceil_mode)
    return _avg_pool_backward(grad_output, windows, count_include_pad, divisor_override)


@lowering("aten.avg_pool3d_backward.default")
def avg_pool3d_backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad,
                        divisor_override):
    windows = Windows.make(self.shape, 3, kernel_size, stride, padding, 1, ceil_mode)
    return _avg_pool_backward(grad_output, windows, count_include_pad, divisor_override)
