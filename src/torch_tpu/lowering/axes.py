"""Dimensions, sizes and index arithmetic that index, scatter, view and shape lowerings share."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import promotion


def dim_of(dim: int, rank: int) -> int:
    """A dimension as a number in [0, rank); a 0-d value counts as one of rank 1."""
    return int(dim) % max(rank, 1)


def dims_of(dims: Any, rank: int) -> tuple[int, ...]:
    return tuple(dim_of(d, rank) for d in ((dims,) if isinstance(dims, int) else dims))


def sized(sizes: Any, count: int) -> tuple[int, ...]:
    """Sizes with -1 replaced by what `count` elements leave for it."""
    sizes = tuple(int(n) for n in sizes)
    if -1 not in sizes:
        return sizes
    at = sizes.index(-1)
    rest = math.prod(n for i, n in enumerate(sizes) if i != at)
    return (*sizes[:at], count // rest if rest else 0, *sizes[at + 1:])


def index_dtype(size: int) -> Any:
    """int32 wherever it can hold every position: 64-bit integers are emulated on TPU."""
    return jnp.int32 if size < 2**31 else jnp.int64


def narrow(index: Any, size: int) -> Any:
    """An index tensor in the cheapest type that holds the positions of a dimension."""
    return index.astype(index_dtype(size))


def wrap(index: Any, size: int) -> Any:
    """As `narrow`, with negative indices counted from the end."""
    if np.dtype(index.dtype).kind == "u":
        return narrow(index, size)
    index = narrow(index, size)
    return jnp.where(index < 0, index + jnp.asarray(size, index.dtype), index)


def at_least_1d(x: Any) -> Any:
    return x.reshape(1) if x.ndim == 0 else x


def along(dim: int, index: Any) -> tuple[Any, ...]:
    """An indexing tuple that applies `index` to one dimension."""
    return (slice(None),) * dim + (index,)


def grid(index: Any, dim: int) -> tuple[Any, ...]:
    """Indices of every position of `index`, with the index itself in dimension `dim` (for gather and scatter)."""
    shape = index.shape
    parts = []
    for d, n in enumerate(shape):
        if d == dim:
            parts.append(index)
        else:
            parts.append(lax.broadcasted_iota(index_dtype(n), (1,) * d + (n,) + (1,) * (len(shape) - d - 1), d))
    return tuple(parts)


def corner(x: Any, shape: tuple[int, ...], skip: int = -1) -> Any:
    """The first `shape` elements of every dimension; dimension `skip` stays whole."""
    if all(n == m or d == skip for d, (n, m) in enumerate(zip(x.shape, shape))):
        return x
    return x[tuple(slice(None) if d == skip else slice(0, n) for d, n in enumerate(shape))]


def windows(x: Any, dim: int, size: int, step: int, dilation: int = 1) -> Any:
    """Sliding windows along a dimension, which becomes two: (how many, size)."""
    n = x.shape[dim]
    reach = dilation * (size - 1) + 1
    count = max((n - reach) // step + 1, 0)
    if step == size and dilation == 1:
        whole = lax.slice_in_dim(x, 0, count * size, 1, dim)
        return whole.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1:])
    if count and 0 < size <= _SLICES:
        parts = [lax.slice_in_dim(x, i * dilation, i * dilation + (count - 1) * step + 1, step, dim)
                 for i in range(size)]
        return jnp.stack(parts, dim + 1)
    if size and 0 < count <= _SLICES:
        parts = [lax.slice_in_dim(x, i * step, i * step + reach, dilation, dim) for i in range(count)]
        return jnp.stack(parts, dim)
    where = np.arange(count, dtype=np.int32)[:, None] * step + np.arange(size, dtype=np.int32)[None] * dilation
    return jnp.take(x, where, axis=dim, mode="clip")


# Slices are cheaper than a gather on TPU, but each is an instruction to compile.
_SLICES = 32


def transpose_of(fn: Any, shape: Any, grad: Any) -> Any:
    """The gradient of a linear function of an array of the given shape; narrow floats add up in float32."""
    wide = promotion.wide(grad)
    turned = jax.linear_transpose(fn, jax.ShapeDtypeStruct(tuple(shape), wide.dtype))
    return turned(wide)[0].astype(grad.dtype)
