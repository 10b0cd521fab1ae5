"""Batch normalisation, in each of the forms in which PyTorch asks for it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .norm import moments
from .promotion import cast, wide
from .table import lowering


def _spread(vector, x):
    """A (C,) vector against x, whose channels are dimension 1."""
    return vector.reshape((1, -1) + (1,) * (x.ndim - 2))


def _affine(x, mean, invstd, weight, bias, dtype):
    out = (x - _spread(mean, x)) * _spread(invstd, x)
    if weight is not None:
        out = out * _spread(cast(weight, x.dtype), x)
    if bias is not None:
        out = out + _spread(cast(bias, x.dtype), x)
    return out.astype(dtype)


def _batch_statistics(x):
    mean, var = moments(x, (0, *range(2, x.ndim)))
    return mean.reshape(-1), var.reshape(-1)


def _toward(running, batch, momentum):
    if running is None:
        return None
    old = wide(running)
    return (old * (1 - momentum) + cast(batch, old.dtype) * momentum).astype(running.dtype)


def train(input, weight, bias, running_mean, running_var, momentum, eps):
    """Output, batch mean, inverse deviation, and the two running statistics after this batch."""
    x = wide(input)
    mean, var = _batch_statistics(x)
    invstd = lax.rsqrt(var + eps)
    count = x.size // x.shape[1]
    unbiased = var * (count / (count - 1)) if count > 1 else jnp.full_like(var, jnp.nan)
    return (_affine(x, mean, invstd, weight, bias, input.dtype), mean, invstd,
            _toward(running_mean, mean, momentum), _toward(running_var, unbiased, momentum))


def evaluate(input, weight, bias, running_mean, running_var, eps):
    x = wide(input)
    return _affine(x, cast(running_mean, x.dtype), lax.rsqrt(cast(running_var, x.dtype) + eps), weight, bias,
                   input.dtype)


def _nothing(input):
    return jnp.zeros((0,), wide(input).dtype)


@lowering("aten._native_batch_norm_legit_functional.default")
def legit_functional(input, weight, bias, running_mean, running_var, training, momentum, eps):
    if training:
        return train(input, weight, bias, running_mean, running_var, momentum, eps)
    return (evaluate(input, weight, bias, running_mean, running_var, eps), _nothing(input), _nothing(input),
            running_mean, running_var)


@lowering("aten._native_batch_norm_legit.no_stats")
def legit_no_stats(input, weight, bias, training, momentum, eps):
    return train(input, weight, bias, None, None, momentum, eps)[:3]


@lowering("aten._native_batch_norm_legit_no_training.default")
def legit_no_training(input, weight, bias, running_mean, running_var, momentum, eps):
    return evaluate(input, weight, bias, running_mean, running_var, eps), _nothing(input), _nothing(input)


@lowering("aten._batch_norm_with_update_functional.default")
def with_update_functional(input, weight, bias, running_mean, running_var, momentum, eps):
    out, mean, invstd, new_mean, new_var = train(input, weight, bias, running_mean, running_var, momentum, eps)
    return out, mean, invstd, jnp.zeros((0,), jnp.uint8), new_mean, new_var


@lowering("aten._batch_norm_no_update.default")
def no_update(input, weight, bias, running_mean, running_var, momentum, eps):
    out = evaluate(input, weight, bias, running_mean, running_var, eps)
    return out, _nothing(input), _nothing(input), jnp.zeros((0,), jnp.uint8)


def _backward(grad_out, input, weight, mean, invstd, train_, output_mask):
    x, grad = wide(input), wide(grad_out)
    axes = (0, *range(2, x.ndim))
    normal = (x - _spread(mean, x)) * _spread(invstd, x)
    sum_grad = jnp.sum(grad, axes)
    sum_normal = jnp.sum(grad * normal, axes)
    dx = dweight = dbias = None
    if output_mask[0]:
        scale = invstd if weight is None else invstd * cast(weight, x.dtype)
        if train_:
            count = x.size // x.shape[1]
            dx = grad - (_spread(sum_grad, x) + normal * _spread(sum_normal, x)) / count
        else:
            dx = grad
        dx = (dx * _spread(scale, x)).astype(input.dtype)
    kind = input.dtype if weight is None else weight.dtype
    if output_mask[1]:
        dweight = sum_normal.astype(kind)
    if output_mask[2]:
        dbias = sum_grad.astype(kind)
    return dx, dweight, dbias


@lowering("aten.native_batch_norm_backward.default")
def batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
                        output_mask):
    dtype = wide(input).dtype
    if train:
        mean, invstd = cast(save_mean, dtype), cast(save_invstd, dtype)
    else:
        mean, invstd = cast(running_mean, dtype), lax.rsqrt(cast(running_var, dtype) + eps)
    return _backward(grad_out, input, weight, mean, invstd, train, output_mask)


@lowering("aten.batch_norm_backward.default")
def batch_norm_backward_reserve(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps,
                                output_mask, reserve):
    return batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps,
                               output_mask)
