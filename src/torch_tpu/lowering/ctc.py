"""Connectionist temporal classification, `tpu::ctc_loss`: targets as a padded matrix, lengths as tensors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .promotion import wide
from .table import lowering

# Log of an impossible event: finite, so that differences of two of them are not NaN.
_NEVER = -1e30


def _alignment(targets, blank):
    """(N, 2S+1) labels with blanks between, and where a label may follow the one two before it."""
    count, size = targets.shape
    labels = jnp.full((count, 2 * size + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    skips = jnp.concatenate([jnp.zeros((count, 2), bool), labels[:, 2:] != labels[:, :-2]], 1) & (labels != blank)
    return labels, skips


def _shift(x, by):
    return jnp.concatenate([jnp.full((x.shape[0], by), _NEVER, x.dtype), x], 1)[:, :x.shape[1]]


def _alphas(log_probs, labels, skips):
    """log_probs (T, N, C) -> (T, N, 2S+1)."""
    width = labels.shape[1]
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(labels, (log_probs.shape[0], *labels.shape)), axis=2)
    emitted = jnp.maximum(emitted, _NEVER)
    first = jnp.where(jnp.arange(width) < 2, emitted[0], _NEVER)

    def step(alpha, emit):
        two = jnp.where(skips, _shift(alpha, 2), _NEVER)
        best = jnp.stack([alpha, _shift(alpha, 1), two])
        alpha = jnp.maximum(jax.nn.logsumexp(best, axis=0) + emit, _NEVER)
        return alpha, alpha

    _, rest = lax.scan(step, first, emitted[1:])
    return jnp.concatenate([first[None], rest])


def _loss(log_probs, targets, input_lengths, target_lengths, blank):
    labels, skips = _alignment(targets, blank)
    alphas = _alphas(log_probs, labels, skips)
    last = jnp.take_along_axis(alphas, jnp.maximum(input_lengths - 1, 0)[None, :, None], axis=0)[0]
    end = (2 * target_lengths)[:, None]
    closing = jnp.take_along_axis(last, end, axis=1)[:, 0]
    label = jnp.where(target_lengths > 0, jnp.take_along_axis(last, jnp.maximum(end - 1, 0), axis=1)[:, 0], _NEVER)
    return -jnp.logaddexp(closing, label), alphas


@lowering("tpu.ctc_loss.default")
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank):
    loss, alphas = _loss(wide(log_probs), targets, input_lengths, target_lengths, blank)
    never = -_NEVER / 2
    empty = input_lengths == 0
    loss = jnp.where(empty, jnp.where(target_lengths == 0, 0.0, jnp.inf), jnp.where(loss > never, jnp.inf, loss))
    alphas = jnp.where(alphas < -never, -jnp.inf, alphas)
    return loss.astype(log_probs.dtype), jnp.moveaxis(alphas, 0, 1).astype(log_probs.dtype)


@lowering("tpu.ctc_loss_backward.default")
def ctc_loss_backward(grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, blank,
                      zero_infinity):
    """PyTorch's gradient already holds the softmax part: exp(log_probs) less the expected alignment."""
    lp, upstream = wide(log_probs), wide(grad)
    _, pull = jax.vjp(lambda x: _loss(x, targets, input_lengths, target_lengths, blank)[0], lp)
    inside = (jnp.arange(lp.shape[0])[:, None] < input_lengths)[..., None]
    out = jnp.exp(lp) * upstream[None, :, None] + pull(upstream)[0]
    impossible = jnp.isinf(neg_log_likelihood)[None, :, None]
    out = jnp.where(impossible, 0.0 if zero_infinity else jnp.nan, out)
    return jnp.where(inside, out, 0.0).astype(log_probs.dtype)
