"""Activations, softmax, and their derivatives."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import dims, promotion
from .table import lowering

wide = promotion.wide


def _wide(*xs: Any) -> tuple[Any, ...]:
    return tuple(wide(x) for x in xs)


@lowering("aten.relu.default")
def relu(self):
    return jnp.maximum(self, 0)


@lowering("aten.threshold.default")
def threshold(self, threshold, value):
    limit = promotion.cast(threshold, self.dtype)
    return jnp.where(self <= limit, promotion.cast(value, self.dtype), self)


@lowering("aten.threshold_backward.default")
def threshold_backward(grad_output, self, threshold):
    self, limit = promotion.promote(self, threshold)
    return jnp.where(self <= limit, 0, grad_output)


@lowering("aten.silu.default")
def silu(self):
    (x,) = _wide(self)
    return x / (1 + jnp.exp(-x))


@lowering("aten.silu_backward.default")
def silu_backward(grad_output, self):
    g, x = _wide(grad_output, self)
    s = 1 / (1 + jnp.exp(-x))
    return g * s * (1 + x * (1 - s))


@lowering("aten.sigmoid_backward.default")
def sigmoid_backward(grad_output, output):
    g, y = _wide(grad_output, output)
    return g * jnp.conj((1 - y) * y)


@lowering("aten.tanh_backward.default")
def tanh_backward(grad_output, output):
    g, y = _wide(grad_output, output)
    return g * jnp.conj(1 - y * y)


_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


@lowering("aten.gelu.default")
def gelu(self, approximate="none"):
    (x,) = _wide(self)
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x)))
    return x * 0.5 * (1 + jax.scipy.special.erf(x * math.sqrt(0.5)))


@lowering("aten.gelu_backward.default")
def gelu_backward(grad_output, self, approximate="none"):
    g, x = _wide(grad_output, self)
    if approximate == "tanh":
        inner = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x))
        slope = (1 - inner * inner) * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
        return g * (0.5 * (1 + inner) + 0.5 * x * slope)
    cdf = 0.5 * (1 + jax.scipy.special.erf(x * math.sqrt(0.5)))
    return g * (cdf + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


@lowering("aten.leaky_relu.default")
def leaky_relu(self, negative_slope=0.01):
    (x,) = _wide(self)
    return jnp.where(x > 0, x, x * promotion.cast(negative_slope, x.dtype))


@lowering("aten.leaky_relu_backward.default")
def leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    g, x = _wide(grad_output, self)
    return jnp.where(x > 0, g, g * promotion.cast(negative_slope, g.dtype))


@lowering("aten.elu.default")
def elu(self, alpha=1, scale=1, input_scale=1):
    (x,) = _wide(self)
    alpha, scale, inner = (promotion.cast(v, x.dtype) for v in (alpha, scale, input_scale))
    return jnp.where(x <= 0, jnp.expm1(jnp.where(x <= 0, x * inner, 0)) * alpha * scale, x * scale)


@lowering("aten.elu_backward.default")
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    g, x = _wide(grad_output, self_or_result)
    alpha, scale, inner = (promotion.cast(v, x.dtype) for v in (alpha, scale, input_scale))
    if is_result:
        return jnp.where(x <= 0, g * inner * (x + alpha * scale), g * scale)
    return jnp.where(x <= 0, g * inner * alpha * scale * jnp.exp(jnp.where(x <= 0, x * inner, 0)), g * scale)


@lowering("aten.celu.default")
def celu(self, alpha=1.0):
    (x,) = _wide(self)
    alpha = promotion.cast(alpha, x.dtype)
    return jnp.where(x <= 0, jnp.expm1(jnp.where(x <= 0, x / alpha, 0)) * alpha, x)


@lowering("aten.hardtanh.default")
def hardtanh(self, min_val=-1, max_val=1):
    return jnp.minimum(jnp.maximum(self, promotion.cast(min_val, self.dtype)), promotion.cast(max_val, self.dtype))


@lowering("aten.hardtanh_backward.default")
def hardtanh_backward(grad_output, self, min_val, max_val):
    x = wide(self)
    low, high = promotion.cast(min_val, x.dtype), promotion.cast(max_val, x.dtype)
    return jnp.where((x <= low) | (x >= high), 0, grad_output)


@lowering("aten.hardsigmoid.default")
def hardsigmoid(self):
    return jnp.clip(wide(self) + 3, 0, 6) / 6


@lowering("aten.hardsigmoid_backward.default")
def hardsigmoid_backward(grad_output, self):
    g, x = _wide(grad_output, self)
    return jnp.where((x > -3) & (x < 3), g / 6, 0)


@lowering("aten.hardswish.default")
def hardswish(self):
    (x,) = _wide(self)
    return x * jnp.clip(x + 3, 0, 6) / 6


@lowering("aten.hardswish_backward.default")
def hardswish_backward(grad_output, self):
    g, x = _wide(grad_output, self)
    return jnp.where(x <= -3, 0, jnp.where(x < 3, g * (x / 3 + 0.5), g))


@lowering("aten.softplus.default")
def softplus(self, beta=1, threshold=20):
    (x,) = _wide(self)
    beta, limit = promotion.cast(beta, x.dtype), promotion.cast(threshold, x.dtype)
    return jnp.where(x * beta > limit, x, jnp.log1p(jnp.exp(jnp.minimum(x * beta, limit))) / beta)


@lowering("aten.softplus_backward.default")
def softplus_backward(grad_output, self, beta, threshold):
    g, x = _wide(grad_output, self)
    beta, limit = promotion.cast(beta, x.dtype), promotion.cast(threshold, x.dtype)
    return jnp.where(x * beta > limit, g, g * jax.nn.sigmoid(x * beta))


@lowering("aten.softshrink.default")
def softshrink(self, lambd=0.5):
    (x,) = _wide(self)
    lambd = promotion.cast(lambd, x.dtype)
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@lowering("aten.hardshrink.default")
def hardshrink(self, lambd=0.5):
    lambd = promotion.cast(lambd, self.dtype)
    return jnp.where((self >= -lambd) & (self <= lambd), 0, self)


@lowering("aten.softshrink_backward.default", "aten.hardshrink_backward.default")
def shrink_backward(grad_output, self, lambd):
    lambd = promotion.cast(lambd, self.dtype)
    return jnp.where((self >= -lambd) & (self <= lambd), 0, grad_output)


@lowering("aten.mish.default")
def mish(self):
    (x,) = _wide(self)
    return x * jnp.tanh(jnp.logaddexp(x, 0))


@lowering("aten.mish_backward.default")
def mish_backward(grad_output, self):
    g, x = _wide(grad_output, self)
    t = jnp.tanh(jnp.logaddexp(x, 0))
    return g * (t + x * jax.nn.sigmoid(x) * (1 - t * t))


@lowering("aten.log_sigmoid_forward.default")
def log_sigmoid_forward(self):
    (x,) = _wide(self)
    size = jnp.exp(-jnp.abs(x))
    return jnp.minimum(x, 0) - jnp.log1p(size), size


@lowering("aten.log_sigmoid_backward.default")
def log_sigmoid_backward(grad_output, self, buffer):
    g, x = _wide(grad_output, self)
    size = jnp.exp(-jnp.abs(x))
    negative = x < 0
    return g * (jnp.where(negative, 1, 0) - jnp.where(negative, 1, -1) * (size / (1 + size)))


@lowering("aten._prelu_kernel.default")
def prelu(self, weight):
    x, w = _wide(self, weight)
    return jnp.where(x > 0, x, x * w)


@lowering("aten._prelu_kernel_backward.default")
def prelu_backward(grad_output, self, weight):
    g, x, w = _wide(grad_output, self, weight)
    return jnp.where(x > 0, g, g * w), jnp.where(x > 0, 0, g * x)


@lowering("aten.rrelu_with_noise_backward.default")
def rrelu_backward(grad_output, self, noise, lower, upper, training, self_is_result):
    g, x = _wide(grad_output, self)
    if training:
        return g * wide(noise)
    return jnp.where(x > 0, g, g * promotion.cast((lower + upper) / 2, g.dtype))


@lowering("aten.glu.default")
def glu(self, dim=-1):
    a, b = jnp.split(wide(self), 2, dim)
    return a * jax.nn.sigmoid(b)


@lowering("aten.glu_backward.default")
def glu_backward(grad_output, self, dim):
    g = wide(grad_output)
    a, b = jnp.split(wide(self), 2, dim)
    s = jax.nn.sigmoid(b)
    return jnp.concatenate([g * s, g * a * s * (1 - s)], dim)


@lowering("aten.glu_jvp.default")
def glu_jvp(glu, x, dx, dim):
    s = jax.nn.sigmoid(jnp.split(wide(x), 2, dim)[1])
    da, db = jnp.split(wide(dx), 2, dim)
    return da * s + wide(glu) * (1 - s) * db


def _as(self: Any, dtype: np.dtype | None) -> Any:
    return wide(self if dtype is None else promotion.cast(self, dtype))


def _softmax_along(x: Any, at: int) -> Any:
    top = lax.stop_gradient(jnp.max(x, at, keepdims=True, initial=-jnp.inf if x.size == 0 else None))
    e = jnp.exp(x - top)
    return e / jnp.sum(e, at, keepdims=True)


@lowering("aten._softmax.default")
def softmax(self, dim, half_to_float):
    return dims.along(_softmax_along)(wide(self), dim)


@lowering("aten._safe_softmax.default")
def safe_softmax(self, dim, dtype=None):
    """A row without one finite value is 0, not NaN."""
    x = _as(promotion.promote_float(self)[0], dtype)
    result = dims.along(_softmax_along)(x, dim)
    empty = jnp.all(x == -jnp.inf, dims.many(dim, x.ndim), keepdims=True)
    return jnp.where(empty, 0, result)


@lowering("aten._softmax_backward_data.default")
def softmax_backward(grad_output, output, dim, input_dtype):
    g, y = _wide(grad_output, output)
    over = dims.many(dim, y.ndim)
    return y * (g - jnp.sum(g * y, over, keepdims=True))


def _log_softmax_along(x: Any, at: int) -> Any:
    off = x - lax.stop_gradient(jnp.max(x, at, keepdims=True, initial=-jnp.inf if x.size == 0 else None))
    return off - jnp.log(jnp.sum(jnp.exp(off), at, keepdims=True))


@lowering("aten._log_softmax.default")
def log_softmax(self, dim, half_to_float):
    return dims.along(_log_softmax_along)(wide(self), dim)


@lowering("aten._log_softmax_backward_data.default")
def log_softmax_backward(grad_output, output, dim, input_dtype):
    g, y = _wide(grad_output, output)
    return g - jnp.exp(y) * jnp.sum(g, dims.many(dim, y.ndim), keepdims=True)


@lowering("aten._masked_softmax.default")
def masked_softmax(self, mask, dim=None, mask_type=None):
    """True masks out. A mask of shape (batch, length) is of padding, of shape (length, length) of attention."""
    x, at = wide(self), (self.ndim if dim is None else dim + 1) - 1
    if mask.shape != x.shape:
        mask = mask[:, None, None, :] if mask_type == 1 else mask[None, None]
    x = jnp.where(mask, -jnp.inf, x)
    result = _softmax_along(x, at % x.ndim)
    return jnp.where(jnp.all(x == -jnp.inf, at % x.ndim, keepdims=True), 0, result)


@lowering("aten._masked_softmax_backward.default")
def masked_softmax_backward(grad_output, output, mask, dim=None):
    at = output.ndim - 1 if dim is None else dim
    return jnp.where(mask, 0, softmax_backward(grad_output, output, at, None))
