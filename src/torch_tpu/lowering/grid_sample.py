"""grid_sampler: values at real positions that a tensor gives."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from .promotion import wide
from .table import lowering

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _unnormalize(x, size, align_corners):
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _clip(x, size):
    """Without jnp.clip: at the border itself PyTorch's gradient is 0."""
    x = jnp.where(x > 0, x, jnp.zeros((), x.dtype))
    return jnp.where(x < size - 1, x, jnp.full((), size - 1, x.dtype))


def _reflect(x, low, high):
    """Mirrors into [low, high], given as twice the bounds."""
    if low == high:
        return jnp.zeros_like(x)
    least, span = low / 2, (high - low) / 2
    x = jnp.abs(x - least)
    flips = jnp.floor(x / span)
    extra = x - flips * span
    return jnp.where(flips % 2 == 0, extra + least, span - extra + least)


def _pad_position(x, size, padding_mode, align_corners):
    if padding_mode == _REFLECTION:
        x = _reflect(x, 0, 2 * (size - 1)) if align_corners else _reflect(x, -1, 2 * size - 1)
    return x if padding_mode == _ZEROS else _clip(x, size)


def _gather(image, positions):
    """image (C, *sizes), one integer array per dimension -> (C, *where); 0 outside."""
    inside = jnp.ones((), bool)
    index = jnp.zeros((), jnp.int32)
    for position, size in zip(positions, image.shape[1:]):
        inside = inside & (position >= 0) & (position < size)
        index = index * size + jnp.clip(position, 0, size - 1).astype(jnp.int32)
    values = image.reshape(image.shape[0], -1)[:, index]
    return jnp.where(inside, values, jnp.zeros((), values.dtype))


def _integer(x):
    """NaN and huge positions lie outside, like any other that misses the image."""
    return jnp.where(jnp.abs(x) < 2**30, x, jnp.full((), -100, x.dtype)).astype(jnp.int32)


def _cubic(t, a=-0.75):
    def near(x):
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x):
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _sample(image, grid, mode, padding_mode, align_corners):
    """image (C, *sizes), grid (*where, rank), whose last dimension names the last image dimension first."""
    sizes = image.shape[1:]
    raw = [_unnormalize(grid[..., len(sizes) - 1 - d], n, align_corners) for d, n in enumerate(sizes)]
    if mode == _BICUBIC:
        lows = [jnp.floor(x) for x in raw]
        weights = [_cubic(x - low) for x, low in zip(raw, lows)]
        total = 0
        for taps in itertools.product(range(4), repeat=len(sizes)):
            at = [_integer(_pad_position(low + (t - 1), n, padding_mode, align_corners))
                  for low, t, n in zip(lows, taps, sizes)]
            weight = 1
            for w, t in zip(weights, taps):
                weight = weight * w[t]
            total = total + _gather(image, at) * weight
        return total
    where = [_pad_position(x, n, padding_mode, align_corners) for x, n in zip(raw, sizes)]
    if mode == _NEAREST:
        return _gather(image, [_integer(jnp.round(x)) for x in where])
    lows = [jnp.floor(x) for x in where]
    total = 0
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight = 1
        for x, low, c in zip(where, lows, corner):
            weight = weight * (x - low if c else low + 1 - x)
        total = total + _gather(image, [_integer(low + c) for low, c in zip(lows, corner)]) * weight
    return total


@lowering("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    def one(image, where):
        return _sample(image, where, interpolation_mode, padding_mode, align_corners)

    return jax.vmap(one)(wide(input), wide(grid)).astype(input.dtype)


@lowering("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sampler_backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    def forward(x, g):
        return grid_sampler(x, g, interpolation_mode, padding_mode, align_corners)

    out, pull = jax.vjp(forward, wide(input), wide(grid))
    dx, dgrid = pull(grad_output.astype(out.dtype))
    return dx.astype(input.dtype) if output_mask[0] else None, dgrid.astype(grid.dtype) if output_mask[1] else None
