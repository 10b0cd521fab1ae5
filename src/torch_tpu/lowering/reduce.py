"""Reductions. Narrow floats accumulate in float32, integers and bools in int64."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import dims, promotion
from .pointwise import is_complex
from .table import lowering

wide = promotion.wide


def _accumulator(self: Any, dtype: np.dtype | None) -> Any:
    """The values in the type in which they are summed."""
    if dtype is None:
        return self.astype(jnp.int64) if promotion.is_integral(self) else wide(self)
    return wide(promotion.cast(self, dtype))


@lowering("aten.sum.default")
def sum_all(self, dtype=None):
    return jnp.sum(_accumulator(self, dtype))


@lowering("aten.sum.dim_IntList")
def sum_dim(self, dim=None, keepdim=False, dtype=None):
    return jnp.sum(_accumulator(self, dtype), dims.many(dim, self.ndim), keepdims=keepdim)


@lowering("aten.nansum.default")
def nansum(self, dim=None, keepdim=False, dtype=None):
    x = _accumulator(self, dtype)
    x = x if promotion.is_integral(x) else jnp.where(jnp.isnan(x), 0, x)
    return jnp.sum(x, dims.many(dim, self.ndim), keepdims=keepdim)


@lowering("aten.mean.default")
def mean_all(self, dtype=None):
    return mean(self, None, False, dtype)


@lowering("aten.mean.dim")
def mean(self, dim=None, keepdim=False, dtype=None):
    x = _accumulator(self, dtype)
    over = dims.many(dim, self.ndim)
    return jnp.sum(x, over, keepdims=keepdim) / math.prod(self.shape[a] for a in over)


@lowering("aten.prod.default")
def prod_all(self, dtype=None):
    return jnp.prod(_accumulator(self, dtype))


@lowering("aten.prod.dim_int")
def prod_dim(self, dim, keepdim=False, dtype=None):
    return jnp.prod(_accumulator(self, dtype), dims.many(dim, self.ndim), keepdims=keepdim)


def _moments(self: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    over = dims.many(dim, self.ndim)
    x = wide(self)
    count = math.prod(self.shape[a] for a in over)
    mean_ = jnp.sum(x, over, keepdims=True) / count
    off = x - mean_
    squares = (off * jnp.conj(off)).real if is_complex(x) else jnp.square(off)
    correction = 1 if correction is None else correction
    free = jnp.maximum(jnp.asarray(count - correction, squares.dtype), 0)
    return jnp.sum(squares, over, keepdims=keepdim) / free, mean_ if keepdim else mean_.reshape(
        [n for i, n in enumerate(self.shape) if i not in over])


@lowering("aten.var.correction", static=("correction",))
def var(self, dim=None, correction=None, keepdim=False):
    return _moments(self, dim, correction, keepdim)[0]


@lowering("aten.std.correction", static=("correction",))
def std(self, dim=None, correction=None, keepdim=False):
    return jnp.sqrt(_moments(self, dim, correction, keepdim)[0])


@lowering("aten.var_mean.correction", static=("correction",))
def var_mean(self, dim=None, correction=None, keepdim=False):
    return _moments(self, dim, correction, keepdim)


@lowering("aten.std_mean.correction", static=("correction",))
def std_mean(self, dim=None, correction=None, keepdim=False):
    variance, mean_ = _moments(self, dim, correction, keepdim)
    return jnp.sqrt(variance), mean_


@lowering("aten.amax.default")
def amax(self, dim=(), keepdim=False):
    return jnp.max(self, dims.many(dim, self.ndim), keepdims=keepdim)


@lowering("aten.amin.default")
def amin(self, dim=(), keepdim=False):
    return jnp.min(self, dims.many(dim, self.ndim), keepdims=keepdim)


@lowering("aten.aminmax.default")
def aminmax(self, dim=None, keepdim=False):
    over = dims.many(dim, self.ndim)
    return jnp.min(self, over, keepdims=keepdim), jnp.max(self, over, keepdims=keepdim)


@lowering("aten._aminmax.default")
def aminmax_all(self):
    return jnp.min(self), jnp.max(self)


@lowering("aten._aminmax.dim")
def aminmax_dim(self, dim, keepdim=False):
    return aminmax(self, dim, keepdim)


@lowering("aten.max.default")
def max_all(self):
    return jnp.max(self)


@lowering("aten.min.default")
def min_all(self):
    return jnp.min(self)


def _arg(self: Any, dim: int | None, keepdim: bool, fn: Any) -> Any:
    """The first extreme; a NaN counts as one."""
    x = self.astype(jnp.int8) if self.dtype == bool else self
    if dim is None or x.ndim == 0:
        found = fn(x.reshape(-1), axis=0)
        return found.reshape((1,) * x.ndim) if keepdim else found
    return fn(x, axis=dim % x.ndim, keepdims=keepdim)


def take(self: Any, index: Any, dim: int, keepdim: bool) -> Any:
    """Values at one index along dim; index has size 1 there, or lacks it."""
    if self.ndim == 0:
        return self
    at = dim % self.ndim
    found = jnp.take_along_axis(self, index if keepdim else jnp.expand_dims(index, at), axis=at)
    return found if keepdim else jnp.squeeze(found, at)


@lowering("aten.argmax.default")
def argmax(self, dim=None, keepdim=False):
    return _arg(self, dim, keepdim, jnp.argmax)


@lowering("aten.argmin.default")
def argmin(self, dim=None, keepdim=False):
    return _arg(self, dim, keepdim, jnp.argmin)


@lowering("aten.max.dim")
def max_dim(self, dim, keepdim=False):
    index = _arg(self, dim, keepdim, jnp.argmax)
    return take(self, index, dim, keepdim), index


@lowering("aten.min.dim")
def min_dim(self, dim, keepdim=False):
    index = _arg(self, dim, keepdim, jnp.argmin)
    return take(self, index, dim, keepdim), index


@lowering("aten.any.default")
def any_all(self):
    return jnp.any(self != 0)


@lowering("aten.all.default")
def all_all(self):
    return jnp.all(self != 0)


@lowering("aten.any.dim", "aten.any.dims")
def any_dim(self, dim=None, keepdim=False):
    return jnp.any(self != 0, _listed(dim, self.ndim), keepdims=keepdim)


@lowering("aten.all.dim", "aten.all.dims")
def all_dim(self, dim=None, keepdim=False):
    return jnp.all(self != 0, _listed(dim, self.ndim), keepdims=keepdim)


def _listed(dim: Any, ndim: int) -> tuple[int, ...]:
    """Here an empty list of dims reduces nothing."""
    return () if isinstance(dim, list | tuple) and len(dim) == 0 else dims.many(dim, ndim)


@lowering("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(self, dim=None):
    return jnp.sum((self != 0).astype(jnp.int64), dims.many(dim, self.ndim))


@lowering("aten.logsumexp.default")
def logsumexp(self, dim, keepdim=False):
    (x,) = promotion.promote_float(self)
    return jax.scipy.special.logsumexp(wide(x), dims.many(dim, self.ndim), keepdims=keepdim)


@lowering("aten.linalg_vector_norm.default", static=("ord",))
def vector_norm(self, ord=2, dim=None, keepdim=False, dtype=None):
    x = wide(self if dtype is None else promotion.cast(self, dtype))
    over = dims.many(dim, self.ndim)
    size = jnp.abs(x)
    if ord == math.inf:
        return jnp.max(size, over, keepdims=keepdim)
    if ord == -math.inf:
        return jnp.min(size, over, keepdims=keepdim)
    if ord == 0:
        return jnp.sum((size != 0).astype(size.dtype), over, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(size, over, keepdims=keepdim)
    if ord == 2:
        squares = jnp.square(x) if not is_complex(x) else jnp.square(x.real) + jnp.square(x.imag)
        return jnp.sqrt(jnp.sum(squares, over, keepdims=keepdim))
    return jnp.power(jnp.sum(jnp.power(size, ord), over, keepdims=keepdim), 1.0 / ord)


@lowering("aten.norm.Scalar", static=("p",))
def norm(self, p=2):
    return vector_norm(self, p)


@lowering("aten.norm.ScalarOpt_dim", static=("p",))
def norm_dim(self, p, dim, keepdim=False):
    return vector_norm(self, 2 if p is None else p, dim, keepdim)


@lowering("aten.norm.ScalarOpt_dim_dtype", static=("p",))
def norm_dim_dtype(self, p, dim, keepdim, dtype):
    return vector_norm(self, 2 if p is None else p, dim, keepdim, dtype)


@lowering("aten.norm.ScalarOpt_dtype", static=("p",))
def norm_dtype(self, p, dtype):
    return vector_norm(self, 2 if p is None else p, dtype=dtype)


@lowering("aten.dist.default", static=("p",))
def dist(self, other, p=2):
    return vector_norm(jnp.subtract(*promotion.promote(self, other)), p)


@lowering("aten._is_all_true.default")
def is_all_true(self):
    return jnp.all(self)


@lowering("aten._is_any_true.default")
def is_any_true(self):
    return jnp.any(self)


@lowering("aten.hash_tensor.default")
def hash_tensor(self, dim=(), keepdim=False, mode=0):
    """The exclusive or of the values' bits, as float64 or int64."""
    x = self.astype(jnp.int64) if promotion.is_integral(self) else lax.bitcast_convert_type(
        self.astype(jnp.float64), jnp.int64)
    over = dims.many(dim, self.ndim)
    result = lax.reduce(x.astype(jnp.uint64), np.uint64(0), lax.bitwise_xor, over)
    return jnp.expand_dims(result, over) if keepdim else result
