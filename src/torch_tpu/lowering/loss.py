"""Losses and their derivatives. `reduction` is 0 (none), 1 (mean) or 2 (sum)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from . import promotion
from .table import lowering

wide = promotion.wide
MEAN, SUM = 1, 2


def reduced(values: Any, reduction: int) -> Any:
    if reduction == MEAN:
        return jnp.sum(values) / values.size if values.size else jnp.sum(values) / 0.0
    return jnp.sum(values) if reduction == SUM else values


def spread(grad: Any, like: Any, reduction: int) -> Any:
    """The gradient of each element's loss."""
    grad = wide(grad)
    return grad / max(like.size, 1) if reduction == MEAN else grad


def _pair(self: Any, target: Any) -> tuple[Any, Any]:
    return tuple(wide(x) for x in promotion.promote(self, target))


@lowering("aten.mse_loss.default")
def mse_loss(self, target, reduction=MEAN):
    a, b = _pair(self, target)
    return reduced(jnp.square(a - b), reduction)


@lowering("aten.mse_loss_backward.default")
def mse_loss_backward(grad_output, self, target, reduction):
    a, b = _pair(self, target)
    off = a - b
    return 2 * off * spread(grad_output, off, reduction)


@lowering("aten.smooth_l1_loss.default")
def smooth_l1_loss(self, target, reduction=MEAN, beta=1.0):
    a, b = _pair(self, target)
    off = jnp.abs(a - b)
    return reduced(jnp.where(off < beta, 0.5 * off * off / beta if beta else off, off - 0.5 * beta), reduction)


@lowering("aten.smooth_l1_loss_backward.default")
def smooth_l1_loss_backward(grad_output, self, target, reduction, beta):
    a, b = _pair(self, target)
    off = a - b
    return spread(grad_output, off, reduction) * jnp.where(jnp.abs(off) < beta, off / beta if beta else 0,
                                                           jnp.sign(off))


@lowering("aten.huber_loss.default")
def huber_loss(self, target, reduction=MEAN, delta=1.0):
    a, b = _pair(self, target)
    off = jnp.abs(a - b)
    return reduced(jnp.where(off <= delta, 0.5 * off * off, delta * (off - 0.5 * delta)), reduction)


@lowering("aten.huber_loss_backward.default")
def huber_loss_backward(grad_output, self, target, reduction, delta):
    a, b = _pair(self, target)
    off = a - b
    return spread(grad_output, off, reduction) * jnp.clip(off, -delta, delta)


@lowering("aten.binary_cross_entropy.default")
def binary_cross_entropy(self, target, weight=None, reduction=MEAN):
    x, t = _pair(self, target)
    values = -(t * jnp.maximum(jnp.log(x), -100) + (1 - t) * jnp.maximum(jnp.log1p(-x), -100))
    return reduced(values if weight is None else values * wide(weight), reduction)


@lowering("aten.binary_cross_entropy_backward.default")
def binary_cross_entropy_backward(grad_output, self, target, weight=None, reduction=MEAN):
    x, t = _pair(self, target)
    slope = spread(grad_output, x, reduction) * (x - t) / jnp.maximum((1 - x) * x, 1e-12)
    return slope if weight is None else slope * wide(weight)


@lowering("aten.binary_cross_entropy_with_logits.default")
def bce_with_logits(self, target, weight=None, pos_weight=None, reduction=MEAN):
    x, t = _pair(self, target)
    log_sigmoid = jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x)))
    if pos_weight is None:
        values = (1 - t) * x - log_sigmoid
    else:
        values = (1 - t) * x - ((wide(pos_weight) - 1) * t + 1) * log_sigmoid
    return reduced(values if weight is None else values * wide(weight), reduction)


@lowering("aten.soft_margin_loss.default")
def soft_margin_loss(self, target, reduction=MEAN):
    x, t = _pair(self, target)
    return reduced(jnp.log1p(jnp.exp(-t * x)), reduction)


@lowering("aten.soft_margin_loss_backward.default")
def soft_margin_loss_backward(grad_output, self, target, reduction):
    x, t = _pair(self, target)
    z = jnp.exp(-t * x)
    return spread(grad_output, x, reduction) * -t * z / (1 + z)


def _classes(self: Any) -> Any:
    """Scores as (batch, class, ...)."""
    return wide(self).reshape(1, -1) if self.ndim < 2 else wide(self)


def _picked(self: Any, target: Any, weight: Any, ignore_index: int) -> tuple[Any, Any, Any, Any]:
    """Scores, safe targets, each target's weight (0 where ignored), and which targets count."""
    x = _classes(self)
    t = target.reshape((x.shape[0], *x.shape[2:])).astype(jnp.int64)
    counts = t != ignore_index
    t = jnp.where(counts, t, 0)
    w = counts.astype(x.dtype) if weight is None else jnp.where(counts, jnp.take(wide(weight), t, axis=0), 0)
    return x, t, w.astype(x.dtype), counts


@lowering("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss_forward(self, target, weight, reduction, ignore_index):
    x, t, w, counts = _picked(self, target, weight, ignore_index)
    score = jnp.take_along_axis(x, jnp.expand_dims(t, 1), 1).squeeze(1)
    values = jnp.where(counts, -score * w, 0)
    if reduction not in (MEAN, SUM):
        return values.reshape(target.shape), jnp.zeros((), x.dtype)
    total = jnp.sum(w)
    return jnp.sum(values) / total if reduction == MEAN else jnp.sum(values), total


@lowering("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    x, t, w, _ = _picked(self, target, weight, ignore_index)
    grad = wide(grad_output)
    grad = grad if reduction in (MEAN, SUM) else grad.reshape(t.shape)
    each = -w * (grad / wide(total_weight) if reduction == MEAN else grad)
    hot = jnp.expand_dims(t, 1) == jnp.arange(x.shape[1]).reshape((1, -1) + (1,) * (x.ndim - 2))
    return jnp.where(hot, jnp.expand_dims(each, 1), 0).reshape(self.shape)


def _margins(x: Any, t: Any, margin: Any) -> Any:
    score = jnp.take_along_axis(x, t[:, None], 1)
    return jnp.where(t[:, None] == jnp.arange(x.shape[1]), 0, jnp.maximum(margin - score + x, 0))


@lowering("aten.multi_margin_loss.default", static=("p",))
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=MEAN):
    x, t = _classes(self), target.reshape(-1)
    z = _margins(x, t, promotion.cast(margin, x.dtype))
    z = z if p == 1 else z * z
    z = z if weight is None else z * jnp.take(wide(weight), t)[:, None]
    return reduced((jnp.sum(z, 1) / x.shape[1]).reshape(target.shape), reduction)


@lowering("aten.multi_margin_loss_backward.default", static=("p",))
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=MEAN):
    x, t = _classes(self), target.reshape(-1)
    z = _margins(x, t, promotion.cast(margin, x.dtype))
    slope = (z > 0).astype(x.dtype) if p == 1 else 2 * z
    slope = slope / x.shape[1]
    slope = slope if weight is None else slope * jnp.take(wide(weight), t)[:, None]
    hot = t[:, None] == jnp.arange(x.shape[1])
    slope = jnp.where(hot, -jnp.sum(slope, 1, keepdims=True), slope)
    grad = spread(grad_output, t, reduction)
    return (slope * (grad if grad.ndim == 0 else grad.reshape(-1, 1))).reshape(self.shape)


def _multilabel(self: Any, target: Any) -> tuple[Any, Any, Any]:
    """Scores, targets before the first -1 of a row, and which classes are targets."""
    x = _classes(self)
    t = target.reshape(x.shape)
    valid = jnp.cumsum((t < 0).astype(jnp.int32), 1) == 0
    labels = jnp.where(valid, t, x.shape[1])
    is_target = jnp.any(labels[:, :, None] == jnp.arange(x.shape[1]), 1)
    return x, labels, is_target


def _multilabel_terms(x: Any, labels: Any, is_target: Any) -> Any:
    """max(0, 1 - x[label] + x[other]) as (batch, label slot, class)."""
    safe = jnp.minimum(labels, x.shape[1] - 1)
    score = jnp.take_along_axis(x, safe, 1)
    keep = (labels < x.shape[1])[:, :, None] & ~is_target[:, None, :]
    return jnp.where(keep, jnp.maximum(1 - score[:, :, None] + x[:, None, :], 0), 0)


@lowering("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss(self, target, reduction):
    x, labels, is_target = _multilabel(self, target)
    values = jnp.sum(_multilabel_terms(x, labels, is_target), (1, 2)) / x.shape[1]
    return (reduced(values.reshape(target.shape[:-1]), reduction),
            is_target.astype(x.dtype).reshape(target.shape))


@lowering("aten.multilabel_margin_loss_backward.default")
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target):
    x, labels, targets = _multilabel(self, target)
    active = (_multilabel_terms(x, labels, targets) > 0).astype(x.dtype) / x.shape[1]
    to_label = jnp.sum(active, 2)
    hot = (labels[:, :, None] == jnp.arange(x.shape[1])).astype(x.dtype)
    slope = jnp.sum(active, 1) - jnp.sum(to_label[:, :, None] * hot, 1)
    grad = wide(grad_output)
    grad = grad / x.shape[0] if reduction == MEAN else grad
    return (slope * (grad if grad.ndim == 0 else grad.reshape(-1, 1))).reshape(self.shape)
