"""Joining, padding and rearranging."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from . import promotion
from .axes import dim_of, dims_of
from .table import lowering


@lowering("aten.cat.default")
def cat(tensors, dim=0):
    tensors = promotion.promote(*tensors)
    # torch still lets a 1-d tensor without elements pass among tensors of any shape
    kept = [t for t in tensors if t.shape != (0,)] or tensors[:1]
    return lax.concatenate(kept, dim_of(dim, kept[0].ndim)) if len(kept) > 1 else kept[0]


@lowering("aten.stack.default", "aten._stack.default")
def stack(tensors, dim=0):
    tensors = promotion.promote(*tensors)
    dim = dim_of(dim, tensors[0].ndim + 1)
    return lax.concatenate([jnp.expand_dims(t, dim) for t in tensors], dim)


@lowering("aten.block_diag.default")
def block_diag(tensors):
    tensors = [t.reshape((1,) * (2 - t.ndim) + t.shape) for t in promotion.promote(*tensors)]
    columns = sum(t.shape[1] for t in tensors)
    padded, column = [], 0
    for t in tensors:
        padded.append(jnp.pad(t, ((0, 0), (column, columns - column - t.shape[1]))))
        column += t.shape[1]
    return lax.concatenate(padded, 0)


@lowering("aten.constant_pad_nd.default")
def constant_pad_nd(self, pad, value=0):
    config = [(0, 0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        config[self.ndim - 1 - i] = (int(pad[2 * i]), int(pad[2 * i + 1]), 0)
    return lax.pad(self, promotion.cast(value, self.dtype), config)


@lowering("aten.repeat.default")
def repeat(self, repeats):
    rank = len(repeats)
    shape = (1,) * (rank - self.ndim) + self.shape
    # one broadcast over (repeat, size) pairs, then merge each pair
    inner = self.reshape(tuple(n for size in shape for n in (1, size)))
    wide = jnp.broadcast_to(inner, tuple(n for r, size in zip(repeats, shape) for n in (r, size)))
    return wide.reshape(tuple(r * size for r, size in zip(repeats, shape)))


@lowering("aten.roll.default")
def roll(self, shifts, dims=()):
    if self.size == 0:
        return self
    if not dims:
        return jnp.roll(self.reshape(-1), int(shifts[0])).reshape(self.shape)
    for shift, dim in zip(shifts, dims):
        self = jnp.roll(self, int(shift), dim_of(dim, self.ndim))
    return self


@lowering("aten.flip.default")
def flip(self, dims):
    return lax.rev(self, dims_of(dims, self.ndim)) if self.ndim else self


@lowering("aten.rot90.default")
def rot90(self, k=1, dims=(0, 1)):
    first, second = dims_of(dims, self.ndim)
    return jnp.rot90(self, k, (first, second))


@lowering("aten.pixel_shuffle.default")
def pixel_shuffle(self, upscale_factor):
    r, (*batch, c, h, w) = upscale_factor, self.shape
    n, out = len(batch), c // (r * r)
    box = self.reshape(*batch, out, r, r, h, w)
    box = box.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return box.reshape(*batch, out, h * r, w * r)


@lowering("aten.pixel_unshuffle.default")
def pixel_unshuffle(self, downscale_factor):
    r, (*batch, c, h, w) = downscale_factor, self.shape
    n = len(batch)
    box = self.reshape(*batch, c, h // r, r, w // r, r)
    box = box.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return box.reshape(*batch, c * r * r, h // r, w // r)


@lowering("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(self, groups):
    n, c, *rest = self.shape
    if 0 in self.shape:
        return self
    return self.reshape(n, groups, c // groups, *rest).swapaxes(1, 2).reshape(self.shape)


@lowering("aten.diag_embed.default")
def diag_embed(self, offset=0, dim1=-2, dim2=-1):
    rank = self.ndim + 1
    dim1, dim2 = dim_of(dim1, rank), dim_of(dim2, rank)
    n = self.shape[-1] + abs(offset)
    row, column = lax.broadcasted_iota(jnp.int32, (n, n), 0), lax.broadcasted_iota(jnp.int32, (n, n), 1)
    padded = jnp.pad(self, [(0, 0)] * (self.ndim - 1) + [(max(-offset, 0), max(offset, 0))])
    spread = jnp.where(column - row == offset, padded[..., :, None], jnp.zeros((), self.dtype))
    return jnp.moveaxis(spread, (-2, -1), (dim1, dim2))


@lowering("aten._chunk_cat.default")
def chunk_cat(tensors, dim, num_chunks):
    rows = []
    for t in promotion.promote(*tensors):
        d = dim_of(dim, t.ndim)
        length = -(-t.shape[d] // num_chunks)
        t = jnp.pad(t, [(0, length * num_chunks - n if i == d else 0) for i, n in enumerate(t.shape)])
        rows.append(t.reshape(*t.shape[:d], num_chunks, math.prod((length, *t.shape[d + 1:]))))
    return lax.concatenate(rows, rows[0].ndim - 1)
