"""Resizing: nearest, linear, cubic, and antialiased, over 1 to 3 dimensions.

Every mode is separable. One dimension is a few taps (positions and weights, computed here as constants), or a dense
matrix where antialiasing needs many.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import context
from .promotion import wide
from .table import lowering


def _scale(size, out, align_corners, given, kind):
    """Input positions per output position, PyTorch's area_pixel_compute_scale."""
    if align_corners:
        return kind.type((size - 1) / (out - 1)) if out > 1 else kind.type(0)
    if given is not None and given > 0:
        return kind.type(1.0 / given)
    return kind.type(size) / kind.type(out)


def _nearest_positions(size, out, given, exact):
    kind = np.dtype(np.float32)
    if not exact and out in (size, 2 * size):
        return np.arange(out) * size // max(out, 1)  # whatever scale is given, as the CPU kernel
    scale = _scale(size, out, False, given, kind)
    where = (np.arange(out, dtype=kind) + (kind.type(0.5) if exact else kind.type(0))) * scale
    return np.minimum(np.floor(where).astype(np.int64), size - 1)


def _take(x, positions, axis):
    size = x.shape[axis]
    times = len(positions) // size if size else 0
    if times * size == len(positions) and np.array_equal(positions, np.repeat(np.arange(size), times)):
        # A whole factor is a broadcast, whose gradient is a sum and not a scatter.
        spread = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[:axis + 1], times, *x.shape[axis + 1:]))
        return spread.reshape(*x.shape[:axis], len(positions), *x.shape[axis + 1:])
    return jnp.take(x, jnp.asarray(positions, jnp.int32), axis=axis)


def _source(size, out, align_corners, given, kind, cubic):
    """Real input position of each output position."""
    scale = _scale(size, out, align_corners, given, kind)
    i = np.arange(out, dtype=kind)
    if align_corners:
        return i * scale
    where = (i + kind.type(0.5)) * scale - kind.type(0.5)
    return where if cubic else np.maximum(where, kind.type(0))


def _linear_taps(size, out, align_corners, given, kind):
    where = _source(size, out, align_corners, given, kind, False)
    low = np.minimum(where.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    part = np.clip(where - low, 0, 1).astype(kind)
    return np.stack([low, high], 1), np.stack([1 - part, part], 1)


def _cubic_weights(t, a=-0.75):
    def near(x):
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x):
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1).astype(t.dtype)


def _cubic_taps(size, out, align_corners, given, kind):
    where = _source(size, out, align_corners, given, kind, True)
    low = np.floor(where)
    positions = np.clip(low.astype(np.int64)[:, None] + np.arange(-1, 3), 0, size - 1)
    return positions, _cubic_weights((where - low).astype(kind))


def _tap(x, taps, axis):
    positions, weights = taps
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    return sum(jnp.take(x, jnp.asarray(positions[:, t], jnp.int32), axis=axis)
               * jnp.asarray(weights[:, t], x.dtype).reshape(shape) for t in range(positions.shape[1]))


def _triangle(x):
    x = np.abs(x)
    return np.where(x < 1, 1 - x, 0)


def _keys(x, a=-0.5):
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x):
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _filter_matrix(size, out, align_corners, given, kernel, reach):
    """(out, size) weights of an antialiasing resize, as in PyTorch's (and Pillow's) separable kernel."""
    scale = float(_scale(size, out, align_corners, given, np.dtype(np.float64)))
    stretch = max(scale, 1.0)
    support = reach * stretch
    matrix = np.zeros((out, size))
    for i in range(out):
        center = scale * (i + 0.5)
        low = max(int(center - support + 0.5), 0)
        high = min(int(center + support + 0.5), size)
        weights = kernel((np.arange(low, high) - center + 0.5) / stretch)
        total = weights.sum()
        matrix[i, low:high] = weights / total if total else weights
    return matrix


def _apply(x, output_size, scales, along):
    rank = len(output_size)
    value = wide(x)
    kind = np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(np.float32)
    integral = np.dtype(x.dtype).kind in "iu"
    if integral:
        value = value.astype(np.float32)
    for d in reversed(range(rank)):
        axis = x.ndim - rank + d
        value = along(value, axis, x.shape[axis], output_size[d], scales[d], kind)
        if integral:  # PyTorch, as Pillow, keeps integers between the passes
            limits = np.iinfo(x.dtype)
            value = jnp.clip(jnp.floor(value + 0.5), limits.min, limits.max)
    return value.astype(x.dtype)


def _nearest(x, output_size, scales, exact):
    for d, out in enumerate(output_size):
        axis = x.ndim - len(output_size) + d
        x = _take(x, _nearest_positions(x.shape[axis], out, scales[d], exact), axis)
    return x


def _with_taps(x, output_size, scales, align_corners, taps):
    def along(value, axis, size, out, given, kind):
        if size == out and (align_corners or given is None):
            return value
        return _tap(value, taps(size, out, align_corners, given, kind), axis)

    return _apply(x, output_size, scales, along)


def _antialiased(x, output_size, scales, align_corners, kernel, reach):
    def along(value, axis, size, out, given, kind):
        if size == out and (align_corners or given is None):
            return value
        matrix = jnp.asarray(_filter_matrix(size, out, align_corners, given, kernel, reach), value.dtype)
        return jnp.moveaxis(jnp.tensordot(value, matrix, ((axis,), (1,)), precision=context.precision()), -1, axis)

    return _apply(x, output_size, scales, along)


def _enter(name, rank, fn, aligned):
    """Enters a mode's forward and backward; the backward is the transpose, every mode being linear."""

    def forward(self, output_size, *rest):
        corners, scales = (rest[0], rest[1:]) if aligned else (False, rest)
        scales = (*scales, *(None,) * (rank - len(scales)))
        return fn(self, tuple(output_size), scales, corners)

    def backward(grad_output, output_size, input_size, *rest):
        grad = wide(grad_output)
        source = jax.ShapeDtypeStruct(tuple(input_size), grad.dtype)
        pull = jax.linear_transpose(lambda x: forward(x, output_size, *rest), source)
        return pull(grad)[0].astype(grad_output.dtype)

    lowering(f"aten.{name}.default")(forward)
    lowering(f"aten.{name}_backward.default")(backward)


for _rank in (1, 2, 3):
    _enter(f"upsample_nearest{_rank}d", _rank, lambda x, size, scales, _: _nearest(x, size, scales, False), False)
    _enter(f"_upsample_nearest_exact{_rank}d", _rank, lambda x, size, scales, _: _nearest(x, size, scales, True), False)
for _name, _rank in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3)):
    _enter(f"upsample_{_name}", _rank, lambda x, size, scales, a: _with_taps(x, size, scales, a, _linear_taps), True)
_enter("upsample_bicubic2d", 2, lambda x, size, scales, a: _with_taps(x, size, scales, a, _cubic_taps), True)
for _name, _kernel, _reach in (("bilinear2d_aa", _triangle, 1), ("bicubic2d_aa", _keys, 2),
                               ("lanczos2d_aa", _lanczos, 3)):
    _enter(f"_upsample_{_name}", 2, lambda x, size, scales, a, k=_kernel, r=_reach: _antialiased(
        x, size, scales, a, k, r), True)
