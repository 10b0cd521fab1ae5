"""Samplers. A key comes from the host's generator; values from JAX's counter-based generator, so they are the same for
the same key wherever they run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from ..runtime import dtypes
from . import promotion
from .table import lowering


def _key(key: Any) -> Any:
    return jax.random.wrap_key_data(key, impl="threefry2x32")


def _floating(dtype: Any) -> np.dtype:
    """The type in which values of a dtype are drawn."""
    return np.dtype(np.float64 if np.dtype(dtype).itemsize == 8 and np.dtype(dtype).kind == "f" else np.float32)


def _dtype(dtype: Any) -> np.dtype:
    return np.dtype(dtype) if dtype is not None else dtypes.to_numpy(torch.get_default_dtype())


def _uniform(key: Any, shape: Any, dtype: Any) -> Any:
    """Uniform on [0, 1) on the grid of the result's own type, so that rounding never gives 1."""
    kind = np.dtype(dtype)
    if kind.kind != "c" and kind.itemsize < 4:
        digits = jnp.finfo(kind).nmant + 1
        bits = jax.random.bits(_key(key), shape, jnp.uint32) >> (32 - digits)
        return bits.astype(jnp.float32) * (2.0 ** -digits)
    return jax.random.uniform(_key(key), shape, _floating(kind))


def _open(key: Any, shape: Any, dtype: Any) -> Any:
    """Uniform on (0, 1]."""
    return 1 - jax.random.uniform(_key(key), shape, _floating(dtype))


def _normal(key: Any, shape: Any, dtype: Any) -> Any:
    if np.dtype(dtype).kind == "c":  # variance 1 in all
        part = np.float64 if np.dtype(dtype).itemsize == 16 else np.float32
        pair = jax.random.normal(_key(key), (2, *shape), part) * np.sqrt(0.5).astype(part)
        return lax.complex(pair[0], pair[1])
    return jax.random.normal(_key(key), shape, _floating(dtype))


def _integers(key: Any, shape: Any, low: Any, span: Any) -> Any:
    """low + (64 random bits modulo span), in wrapping 64-bit arithmetic as ATen does; span 0 means 2**64."""
    bits = jax.random.bits(_key(key), shape, jnp.uint64)
    span = jnp.asarray(span).astype(jnp.int64).astype(jnp.uint64)
    drawn = jnp.where(span == 0, bits, bits % jnp.maximum(span, 1))
    return drawn.astype(jnp.int64) + jnp.asarray(low).astype(jnp.int64)


def _whole(dtype: Any) -> int:
    """How many integers random_() draws from: those that the type holds exactly."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return 2
    if kind.kind in "iu":
        return min(int(np.iinfo(kind).max), 2**63 - 1) + 1
    return 2 ** (int(jnp.finfo(kind).nmant) + 1) + 1


@lowering("aten.uniform.default", random=True, traced=("from", "to"))
def uniform(self, low=0.0, high=1.0, *, key):
    kind = _floating(self.dtype)
    low, high = promotion.cast(low, kind), promotion.cast(high, kind)
    u = _uniform(key, self.shape, self.dtype)
    value = u * (high - low) + low
    return jnp.where((value >= high) & (high > low), low, value)


@lowering("aten.normal_functional.default", random=True, traced=("mean", "std"))
def normal(self, mean=0.0, std=1.0, *, key):
    noise = _normal(key, self.shape, self.dtype)
    return noise * promotion.cast(std, noise.dtype) + promotion.cast(mean, noise.dtype)


@lowering("aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.Tensor_Tensor", random=True,
          traced=("mean", "std"))
def normal_tensors(mean, std=1.0, *, key):
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    kind = dtypes.to_numpy(promotion.result_dtype(mean, std))
    noise = _normal(key, shape, kind)
    return noise * promotion.cast(std, noise.dtype) + promotion.cast(mean, noise.dtype)


@lowering("aten.normal.float_float", random=True, traced=("mean", "std"))
def normal_size(mean, std, size, dtype=None, *, key):
    noise = _normal(key, tuple(size), _dtype(dtype))
    return noise * promotion.cast(std, noise.dtype) + promotion.cast(mean, noise.dtype)


@lowering("aten.log_normal.default", random=True, traced=("mean", "std"))
def log_normal(self, mean=1.0, std=2.0, *, key):
    return jnp.exp(normal(self, mean, std, key=key))


@lowering("aten.cauchy.default", random=True, traced=("median", "sigma"))
def cauchy(self, median=0.0, sigma=1.0, *, key):
    kind = _floating(self.dtype)
    u = jax.random.uniform(_key(key), self.shape, kind)
    return promotion.cast(median, kind) + promotion.cast(sigma, kind) * jnp.tan(np.pi * (u - 0.5))


@lowering("aten.exponential.default", random=True, traced=("lambd",))
def exponential(self, lambd=1.0, *, key):
    draw = -jnp.log(_open(key, self.shape, self.dtype))
    return draw / promotion.cast(lambd, draw.dtype)


@lowering("aten.geometric.default", random=True, traced=("p",))
def geometric(self, p, *, key):
    u = _open(key, self.shape, np.float64 if self.dtype == np.float64 else np.float32)
    return jnp.maximum(jnp.ceil(jnp.log(u) / jnp.log1p(-promotion.cast(p, u.dtype))), 1)


@lowering("aten.random.default", random=True)
def random(self, *, key):
    return promotion.cast(_integers(key, self.shape, 0, _whole(self.dtype) if _whole(self.dtype) < 2**63 else
                                    -(2**63)), self.dtype)


@lowering("aten.random.to", random=True, traced=("to",))
def random_to(self, to, *, key):
    return promotion.cast(_integers(key, self.shape, 0, to), self.dtype)


@lowering("aten.random.from", random=True, traced=("from", "to"))
def random_from(self, low, to, *, key):
    if to is None:  # up to the greatest value of the type, included
        top = _whole(self.dtype)
        return promotion.cast(_integers(key, self.shape, low, (-(2**63) if top == 2**63 else top) - _long(low)),
                              self.dtype)
    return promotion.cast(_integers(key, self.shape, low, _long(to) - _long(low)), self.dtype)


def _long(x: Any) -> Any:
    return jnp.asarray(x).astype(jnp.int64)


@lowering("aten.bernoulli.default", random=True)
def bernoulli(self, *, key):
    p = promotion.wide(self)
    return jax.random.uniform(_key(key), self.shape, p.dtype) < p


@lowering("aten.bernoulli.p", random=True, traced=("p",))
def bernoulli_p(self, p, *, key):
    return jax.random.uniform(_key(key), self.shape, jnp.float32) < promotion.cast(p, np.float32)


@lowering("aten.bernoulli.Tensor", random=True)
def bernoulli_tensor(self, p, *, key):
    p = promotion.wide(p)
    return jax.random.uniform(_key(key), self.shape, p.dtype if p.dtype == np.float64 else jnp.float32) < p


@lowering("aten.poisson.default", random=True)
def poisson(self, *, key):
    return jax.random.poisson(_key(key), promotion.wide(self), self.shape, jnp.int64)


@lowering("aten.binomial.default", random=True)
def binomial(count, prob, *, key):
    n, p = (promotion.wide(x) for x in promotion.promote(count, prob))
    return jax.random.binomial(_key(key), n, p, jnp.broadcast_shapes(n.shape, p.shape), n.dtype)


@lowering("aten._standard_gamma.default", random=True)
def standard_gamma(self, *, key):
    a = promotion.wide(self)
    return jax.random.gamma(_key(key), a, a.shape, a.dtype)


@lowering("aten._standard_gamma_grad.default")
def standard_gamma_grad(self, output):
    return lax.random_gamma_grad(promotion.wide(self), promotion.wide(output))


@lowering("aten._sample_dirichlet.default", random=True)
def sample_dirichlet(self, *, key):
    a = promotion.wide(self)
    return jax.random.dirichlet(_key(key), a, a.shape[:-1], a.dtype)


@lowering("aten.multinomial.default", random=True)
def multinomial(self, num_samples, replacement=False, *, key):
    p = promotion.wide(self)
    if replacement and num_samples > 1:
        total = jnp.cumsum(p, -1)
        at = _uniform(key, (*p.shape[:-1], num_samples), p.dtype) * total[..., -1:]
        # The first category whose running sum passes the draw: never one of probability 0.
        return jax.vmap(lambda t, u: jnp.searchsorted(t, u, side="right"))(
            total.reshape(-1, p.shape[-1]), at.reshape(-1, num_samples)).reshape(at.shape).clip(
                0, p.shape[-1] - 1).astype(jnp.int64)
    race = p / jnp.maximum(-jnp.log(_open(key, p.shape, p.dtype)), jnp.finfo(p.dtype).tiny)
    race = jnp.where(p > 0, race, -1)
    if num_samples == 1:
        return jnp.argmax(race, -1, keepdims=True)
    return lax.top_k(race, num_samples)[1].astype(jnp.int64)


@lowering("aten.randperm.default", "aten.randperm.generator", random=True)
def randperm(n, dtype=np.int64, *, key):
    return jax.random.permutation(_key(key), n).astype(dtype or np.int64)


@lowering("aten.rand.default", "aten.rand.generator", random=True)
def rand(size, dtype=None, *, key):
    return _uniform(key, tuple(size), _dtype(dtype))


@lowering("aten.rand_like.default", "aten.rand_like.generator", random=True)
def rand_like(self, dtype=None, *, key):
    return _uniform(key, self.shape, dtype or self.dtype)


@lowering("aten.randn.default", "aten.randn.generator", random=True)
def randn(size, dtype=None, *, key):
    return _normal(key, tuple(size), _dtype(dtype))


@lowering("aten.randn_like.default", "aten.randn_like.generator", random=True)
def randn_like(self, dtype=None, *, key):
    return _normal(key, self.shape, dtype or self.dtype)


@lowering("aten.randint.default", "aten.randint.generator", random=True, traced=("high",))
def randint(high, size, dtype=np.int64, *, key):
    return promotion.cast(_integers(key, tuple(size), 0, high), dtype or np.int64)


@lowering("aten.randint.low", "aten.randint.low_generator", random=True, traced=("low", "high"))
def randint_low(low, high, size, dtype=np.int64, *, key):
    return promotion.cast(_integers(key, tuple(size), low, _long(high) - _long(low)), dtype or np.int64)


@lowering("aten.randint_like.default", "aten.randint_like.generator", "aten.randint_like.Tensor",
          "aten.randint_like.Tensor_generator", random=True, traced=("high",))
def randint_like(self, high, dtype=None, *, key):
    return promotion.cast(_integers(key, self.shape, 0, high), dtype or self.dtype)


@lowering("aten.randint_like.low_dtype", "aten.randint_like.low_generator_dtype", random=True, traced=("low", "high"))
def randint_like_low(self, low, high, dtype=None, *, key):
    return promotion.cast(_integers(key, self.shape, low, _long(high) - _long(low)), dtype or self.dtype)


@lowering("aten.native_dropout.default", random=True)
def native_dropout(input, p, train=None, *, key):
    if train is False or p == 0:
        return input, jnp.ones(input.shape, bool)
    mask = jax.random.uniform(_key(key), input.shape, jnp.float32) >= p
    x = promotion.wide(input)
    return jnp.where(mask, x * (0.0 if p == 1 else 1 / (1 - p)), 0), mask


@lowering("aten._fused_dropout.default", random=True)
def fused_dropout(self, p, *, key):
    """Here p is the chance to keep."""
    mask = jax.random.uniform(_key(key), self.shape, jnp.float32) < p
    return jnp.where(mask, promotion.wide(self) / p, 0), mask


@lowering("aten.native_dropout_backward.default", "aten._masked_scale.default")
def native_dropout_backward(grad_output, mask, scale):
    return jnp.where(mask != 0, promotion.wide(grad_output) * scale, 0)


@lowering("aten.rrelu_with_noise_functional.default", random=True)
def rrelu_with_noise(self, noise, lower=0.125, upper=1 / 3, training=False, *, key):
    x = promotion.wide(self)
    lower, upper = promotion.cast(lower, x.dtype), promotion.cast(upper, x.dtype)
    if not training:
        return jnp.where(x > 0, x, x * (lower + upper) / 2), noise
    slope = jax.random.uniform(_key(key), self.shape, x.dtype) * (upper - lower) + lower
    slope = jnp.where(x > 0, 1, slope)
    return x * slope, slope
