"""Running reductions along a dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from . import dims, promotion
from .pointwise import is_complex, logaddexp
from .reduce import _accumulator as accumulator
from .table import lowering


@lowering("aten.cumsum.default")
def cumsum(self, dim, dtype=None):
    return dims.along(jnp.cumsum)(accumulator(self, dtype), dim)


@lowering("aten.cumprod.default")
def cumprod(self, dim, dtype=None):
    return dims.along(jnp.cumprod)(accumulator(self, dtype), dim)


@lowering("aten.logcumsumexp.default", "aten._logcumsumexp.default")
def logcumsumexp(self, dim):
    x = promotion.wide(self)
    if is_complex(x):
        return dims.along(lambda v, at: lax.associative_scan(logaddexp, v, axis=at))(x, dim)
    # ATen's kernel accumulates in double, and the derivative takes differences of the results.
    return dims.along(lax.cumlogsumexp)(x.astype(jnp.float64), dim)


def _extreme(self: Any, dim: int, beats: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Running extreme and its latest index; a NaN, once seen, stays."""

    def combine(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
        take = (b[0] != b[0]) | (~(a[0] != a[0]) & beats(b[0], a[0]))
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    def scan(x: Any, at: int) -> tuple[Any, Any]:
        return lax.associative_scan(combine, (x, lax.broadcasted_iota(jnp.int64, x.shape, at)), axis=at)

    return dims.along(scan)(self, dim)


@lowering("aten.cummax.default")
def cummax(self, dim):
    return _extreme(self, dim, jnp.greater_equal)


@lowering("aten.cummin.default")
def cummin(self, dim):
    return _extreme(self, dim, jnp.less_equal)
