"""Histograms over equal or given bins."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from . import promotion
from .pointwise import is_float
from .table import lowering


def _outer(x: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The range: equal ends mean the data's own; a range without width is widened by one each way."""
    if x.size:
        same = low == high
        low = jnp.where(same, jnp.min(x).astype(low.dtype), low)
        high = jnp.where(same, jnp.max(x).astype(low.dtype), high)
    flat = low == high
    return jnp.where(flat, low - 1, low), jnp.where(flat, high + 1, high)


def _place(x: Any, low: Any, high: Any, bins: int) -> Any:
    """The bin of each value; `bins` for one outside. The last bin holds its upper end."""
    inside = (x >= low) & (x <= high)
    at = jnp.where(inside, (x - low) * bins / (high - low), 0).astype(jnp.int64)
    return jnp.where(inside, jnp.minimum(at, bins - 1), bins)


@lowering("aten.histc.default")
def histc(self, bins=100, min=0, max=0):
    floating = is_float(self)
    x = promotion.wide(self).reshape(-1) if floating else self.reshape(-1).astype(jnp.int64)
    kind = x.dtype if floating else np.dtype(np.float64)
    low, high = _outer(x, promotion.cast(min, kind), promotion.cast(max, kind))
    return jnp.zeros(bins + 1, jnp.int64).at[_place(x, low, high, bins)].add(1)[:bins]


def _search(x: Any, edges: Any) -> Any:
    """The bin of each value among increasing edges."""
    bins = edges.shape[0] - 1
    at = jnp.searchsorted(edges, x, side="right") - 1
    inside = (x >= edges[0]) & (x <= edges[-1])
    return jnp.where(inside, jnp.minimum(at, bins - 1), bins)


def _edges(low: Any, high: Any, bins: int) -> Any:
    index = jnp.arange(bins + 1)
    step = (high - low) / bins
    return jnp.where(index < (bins + 1) // 2, low + step * index, high - step * (bins - index)).astype(low.dtype)


def _counted(points: Any, edges: list[Any], weight: Any, density: bool) -> Any:
    """Weights per cell of a grid; points are (count, dimensions)."""
    shape = tuple(e.shape[0] - 1 for e in edges)
    weights = jnp.ones(points.shape[0], points.dtype) if weight is None else weight.reshape(-1).astype(points.dtype)
    cells = jnp.zeros(tuple(n + 1 for n in shape), points.dtype)
    where = tuple(_search(points[:, d], e) for d, e in enumerate(edges))
    cells = cells.at[where].add(weights)[tuple(slice(n) for n in shape)]
    if density:
        cells = cells / jnp.sum(cells)
        for d, e in enumerate(edges):
            cells = cells / jnp.diff(e).reshape((-1,) + (1,) * (len(shape) - d - 1))
    return cells


def _ranges(points: Any, bins: Any, range: Any) -> list[Any]:
    """Edges per dimension, over the given range or the data's own (0 to 1 without data)."""
    edges = []
    for d, count in enumerate(bins):
        if range is None and points.shape[0]:
            low, high = jnp.min(points[:, d]), jnp.max(points[:, d])
        else:
            low, high = (jnp.asarray(v, points.dtype) for v in (range[2 * d:2 * d + 2] if range else (0.0, 1.0)))
        flat = low == high
        edges.append(_edges(jnp.where(flat, low - 0.5, low), jnp.where(flat, high + 0.5, high), count))
    return edges


@lowering("aten.histogram.bin_ct")
def histogram(self, bins=100, range=None, weight=None, density=False):
    points = self.reshape(-1, 1)
    edges = _ranges(points, [bins], range)
    return _counted(points, edges, weight, density), edges[0]


@lowering("aten.histogram.bins_tensor")
def histogram_edges(self, bins, weight=None, density=False):
    return _counted(self.reshape(-1, 1), [bins], weight, density), bins


def _points(self: Any) -> Any:
    return self.reshape(-1, self.shape[-1])


@lowering("aten._histogramdd_bin_edges.default")
def histogramdd_edges(self, bins, range=None, weight=None, density=False):
    return _ranges(_points(self), bins, range)


@lowering("aten._histogramdd_from_bin_cts.default")
def histogramdd(self, bins, range=None, weight=None, density=False):
    return _counted(_points(self), _ranges(_points(self), bins, range), weight, density)


@lowering("aten._histogramdd_from_bin_tensors.default")
def histogramdd_tensors(self, bins, weight=None, density=False):
    return _counted(_points(self), list(bins), weight, density)
