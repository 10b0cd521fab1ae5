"""Reflection and replication padding, and sliding patches; each backward is the transpose of its forward."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .axes import transpose_of, windows
from .table import lowering


def _pad(x, padding, edge):
    """Pads the last dimensions, then crops where a padding is negative."""
    for i in range(len(padding) // 2):
        dim, before, after = x.ndim - 1 - i, int(padding[2 * i]), int(padding[2 * i + 1])
        n = x.shape[dim]
        parts = [x]
        if before > 0:
            parts.insert(0, edge(x, dim, before, True))
        if after > 0:
            parts.append(edge(x, dim, after, False))
        x = lax.concatenate(parts, dim) if len(parts) > 1 else x
        x = lax.slice_in_dim(x, max(-before, 0), x.shape[dim] - max(-after, 0), 1, dim) if min(before, after) < 0 else x
        assert x.shape[dim] == n + before + after
    return x


def _reflected(x, dim, count, first):
    n = x.shape[dim]
    start = 1 if first else n - 1 - count
    return lax.rev(lax.slice_in_dim(x, start, start + count, 1, dim), (dim,))


def _replicated(x, dim, count, first):
    edge = lax.slice_in_dim(x, 0, 1, 1, dim) if first else lax.slice_in_dim(x, x.shape[dim] - 1, x.shape[dim], 1, dim)
    return jnp.broadcast_to(edge, (*x.shape[:dim], count, *x.shape[dim + 1:]))


@lowering("aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default")
def reflection_pad(self, padding):
    return _pad(self, padding, _reflected)


@lowering("aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default")
def replication_pad(self, padding):
    return _pad(self, padding, _replicated)


@lowering("aten.reflection_pad1d_backward.default", "aten.reflection_pad2d_backward.default",
          "aten.reflection_pad3d_backward.default")
def reflection_pad_backward(grad_output, self, padding):
    return transpose_of(lambda x: reflection_pad(x, padding), self.shape, grad_output)


@lowering("aten.replication_pad1d_backward.default", "aten.replication_pad2d_backward.default",
          "aten.replication_pad3d_backward.default")
def replication_pad_backward(grad_output, self, padding):
    return transpose_of(lambda x: replication_pad(x, padding), self.shape, grad_output)


@lowering("aten.im2col.default")
def im2col(self, kernel_size, dilation, padding, stride):
    pads = [(0, 0)] * (self.ndim - 2) + [(p, p) for p in padding]
    x = jnp.pad(self, pads)
    rows, columns = x.ndim - 2, x.ndim - 1
    x = windows(x, columns, kernel_size[1], stride[1], dilation[1])
    x = windows(x, rows, kernel_size[0], stride[0], dilation[0])
    # (..., C, out rows, kernel rows, out columns, kernel columns)
    x = jnp.moveaxis(x, (-3, -1), (-4, -3))
    *batch, c, kh, kw, oh, ow = x.shape
    return x.reshape(*batch, c * kh * kw, oh * ow)


@lowering("aten.col2im.default")
def col2im(self, output_size, kernel_size, dilation, padding, stride):
    channels = self.shape[-2] // (kernel_size[0] * kernel_size[1])
    shape = (*self.shape[:-2], channels, *output_size)
    return transpose_of(lambda x: im2col(x, kernel_size, dilation, padding, stride), shape, self)
