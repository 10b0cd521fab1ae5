"""Layer, group and root-mean-square normalisation. Statistics in float32 for narrow floats."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from .promotion import cast, wide
from .table import lowering


def _tail(x, normalized_shape):
    return tuple(range(x.ndim - len(normalized_shape), x.ndim))


def moments(x, axes):
    """Mean and biased variance over the axes, which are kept."""
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axes, keepdims=True)


@lowering("aten.native_layer_norm.default")
def layer_norm(input, normalized_shape, weight, bias, eps):
    x = wide(input)
    axes = _tail(x, normalized_shape)
    if math.prod(normalized_shape) == 0:
        mean = jnp.zeros([1 if i in axes else n for i, n in enumerate(x.shape)], x.dtype)
        return input, mean, mean
    mean, var = moments(x, axes)
    rstd = lax.rsqrt(var + eps)
    out = (x - mean) * rstd
    if weight is not None:
        out = out * cast(weight, x.dtype)
    if bias is not None:
        out = out + cast(bias, x.dtype)
    return out.astype(input.dtype), mean, rstd


@lowering("aten.native_layer_norm_backward.default")
def layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    x, grad = wide(input), wide(grad_out)
    axes = _tail(x, normalized_shape)
    lead = tuple(range(x.ndim - len(normalized_shape)))
    rstd = cast(rstd, x.dtype)
    normal = (x - cast(mean, x.dtype)) * rstd
    scaled = grad if weight is None else grad * cast(weight, x.dtype)
    dx = dweight = dbias = None
    if output_mask[0]:
        dx = (scaled - jnp.mean(scaled, axes, keepdims=True)
              - normal * jnp.mean(scaled * normal, axes, keepdims=True)) * rstd
        dx = dx.astype(input.dtype)
    if output_mask[1] and weight is not None:
        dweight = jnp.sum(grad * normal, lead).astype(weight.dtype)
    if output_mask[2]:
        dbias = jnp.sum(grad, lead).astype(input.dtype if bias is None else bias.dtype)
    return dx, dweight, dbias


@lowering("aten._fused_rms_norm.default")
def rms_norm(input, normalized_shape, weight, eps):
    x = wide(input)
    if eps is None:
        eps = float(jnp.finfo(input.dtype).eps)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x), _tail(x, normalized_shape), keepdims=True) + eps)
    out = x * rstd
    if weight is not None:
        out = out * cast(weight, x.dtype)
    return out.astype(input.dtype), rstd


@lowering("aten._fused_rms_norm_backward.default")
def rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    x, grad = wide(input), wide(grad_out)
    rstd = cast(rstd, x.dtype)
    normal = x * rstd
    scaled = grad if weight is None else grad * cast(weight, x.dtype)
    dx = dweight = None
    if output_mask[0]:
        dx = rstd * (scaled - normal * jnp.mean(scaled * normal, _tail(x, normalized_shape), keepdims=True))
        dx = dx.astype(input.dtype)
    if output_mask[1] and weight is not None:
        dweight = jnp.sum(grad * normal, tuple(range(x.ndim - len(normalized_shape)))).astype(weight.dtype)
    return dx, dweight


def _per_channel(vector, dtype, group):
    """A (C,) vector against (N, G, C/G, HxW)."""
    return cast(vector, dtype).reshape(1, group, -1, 1)


@lowering("aten.native_group_norm.default")
def group_norm(input, weight, bias, N, C, HxW, group, eps):
    x = wide(input).reshape(N, group, C // group, HxW)
    mean, var = moments(x, (2, 3))
    rstd = lax.rsqrt(var + eps)
    out = (x - mean) * rstd
    if weight is not None:
        out = out * _per_channel(weight, x.dtype, group)
    if bias is not None:
        out = out + _per_channel(bias, x.dtype, group)
    return out.reshape(input.shape).astype(input.dtype), mean.reshape(N, group), rstd.reshape(N, group)


@lowering("aten.native_group_norm_backward.default")
def group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    shape = (N, group, C // group, HxW)
    x, grad = wide(input).reshape(shape), wide(grad_out).reshape(shape)
    rstd = cast(rstd, x.dtype).reshape(N, group, 1, 1)
    normal = (x - cast(mean, x.dtype).reshape(N, group, 1, 1)) * rstd
    scaled = grad if weight is None else grad * _per_channel(weight, x.dtype, group)
    dx = dweight = dbias = None
    if output_mask[0]:
        dx = (scaled - jnp.mean(scaled, (2, 3), keepdims=True)
              - normal * jnp.mean(scaled * normal, (2, 3), keepdims=True)) * rstd
        dx = dx.reshape(input.shape).astype(input.dtype)
    kind = input.dtype if weight is None else weight.dtype
    if output_mask[1]:
        dweight = jnp.sum(grad * normal, (0, 3)).reshape(C).astype(kind)
    if output_mask[2]:
        dbias = jnp.sum(grad, (0, 3)).reshape(C).astype(kind)
    return dx, dweight, dbias
