"""Scaled dot-product attention and its gradient, `tpu::sdpa`.

Queries of one key/value head are laid side by side, so grouped-query attention is a plain batched product and nothing
is repeated. Scores are float32 (float64 for float64). When they would be too large to hold, queries go in blocks.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from . import context, flash
from .matmul import accumulator, dot
from .table import lowering

# Scores held at once: 2**26 float32 are 256 MB.
_SCORES = 2**26


def _fold(x, heads):
    """(..., H, L, D) -> (B, heads, H/heads, L, D)."""
    shape = (1,) * (3 - x.ndim) + x.shape
    return x.reshape(math.prod(shape[:-3]), heads, shape[-3] // heads, *shape[-2:])


def _fold_mask(mask, lead, all_heads, heads):
    """A mask that broadcasts against (*lead, H, Lq, Lk), as (1 or B, 1 or heads, 1 or G, 1 or Lq, 1 or Lk)."""
    mask = mask.reshape((1,) * (len(lead) + 3 - mask.ndim) + mask.shape)
    *batch, of_heads, rows, columns = mask.shape
    if any(n != 1 for n in batch):
        mask = jnp.broadcast_to(mask, (*lead, of_heads, rows, columns))
    batch_size = math.prod(mask.shape[:len(lead)])
    split = (1, 1) if of_heads == 1 else (heads, all_heads // heads)
    return mask.reshape(batch_size, *split, rows, columns)


def _rows(x):
    """(B, K, G, L, x) -> (B, K, G*L, x): to XLA the plainest of batched products, which it need not transpose."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _product(a, b, contract):
    """a (B, K, G, L, x) with b (B, K, M, N), batched over B and K: a's last dimension with one of b's."""
    result = (*a.shape[:-1], b.shape[5 - contract])
    if a.shape[0] == 1:  # a cache is laid out so (compile/graph.py)
        return dot(_rows(a)[0], b[0], ((2,), (contract - 1,)), ((0,), (0,))).reshape(result)
    return dot(_rows(a), b, ((3,), (contract,)), ((0, 1), (0, 1))).reshape(result)


def _product_of_rows(a, b):
    """(B, K, x, y): a (B, K, G, L, x) with b (B, K, G, L, y), summed over G and L."""
    return dot(_rows(a), _rows(b), ((2,), (2,)), ((0, 1), (0, 1)))


def _scores(q, k, mask, scale, is_causal, first_row):
    """(B, K, G, Lq, Lk): scaled, masked with -inf."""
    scores = _product(q, k, 3)
    scores = scores * jnp.asarray(scale, scores.dtype)
    if is_causal:
        scores = jnp.where(_causal(scores.shape, first_row), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask.astype(scores.dtype)
    return scores


def _added(mask):
    """What a mask adds to the scores: finite, so that rows without any key give no NaN."""
    wide = jnp.float32 if mask.dtype == bool else jnp.promote_types(jnp.float32, mask.dtype)
    low = jnp.asarray(jnp.finfo(jnp.float32).min, wide)
    return jnp.where(mask, jnp.zeros((), wide), low) if mask.dtype == bool else jnp.maximum(mask.astype(wide), low)


def _seen(mask, shape, is_causal, first_row):
    """(1 or B, 1 or K, 1 or G, 1 or Lq, 1): rows that see a key; the others become zeros."""
    given = mask if mask.dtype == bool else ~jnp.isneginf(mask)
    if is_causal:
        given = given & _causal(shape, first_row)
    return jnp.any(given, -1, keepdims=True)


def _finite(logsumexp):
    """Of rows without any key: subtract 0, so that their weights become zeros and not NaN."""
    return jnp.where(jnp.isneginf(logsumexp), jnp.zeros((), logsumexp.dtype), logsumexp)


def _causal(shape, first_row):
    """(Lq, Lk): which keys a row sees."""
    rows = first_row + lax.broadcasted_iota(jnp.int32, shape[-2:], 0)
    return rows >= lax.broadcasted_iota(jnp.int32, shape[-2:], 1)


def _attend(q, k, v, mask, keep, dropout_p, is_causal, scale, first_row):
    scores = _scores(q, k, None if mask is None else _added(mask), scale, is_causal, first_row)
    # With a mask that is added, the plain maximum, and weights divided before their product, XLA:TPU makes one fusion
    # of the scores' product, maximum, exponential and sum, and keeps the scores out of HBM.
    peak = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, -1, keepdims=True)
    logsumexp = peak + jnp.log(total)
    if mask is not None:
        seen = _seen(mask, scores.shape, is_causal, first_row)
        logsumexp = jnp.where(seen, logsumexp, -jnp.inf)
        total = jnp.where(seen, total, jnp.inf)
    if keep is not None:
        weights = jnp.where(keep, weights, jnp.zeros((), weights.dtype)) / (1 - dropout_p) if dropout_p < 1 \
            else jnp.zeros_like(weights)
    if context.platform_name() == "tpu":
        return _product((weights / total).astype(v.dtype), v, 2), logsumexp[..., 0]
    return _product(weights.astype(v.dtype), v, 2) / total, logsumexp[..., 0]


def _gradients(grad, q, k, v, out, logsumexp, mask, keep, dropout_p, is_causal, scale, first_row):
    """Of query, key, value and scores, in the accumulation type."""
    scores = _scores(q, k, mask, scale, is_causal, first_row)
    weights = jnp.exp(scores - _finite(logsumexp)[..., None])
    d_weights = _product(grad, v, 3)
    dropped = weights
    if keep is not None:
        factor = keep.astype(weights.dtype) / (1 - dropout_p) if dropout_p < 1 else jnp.zeros_like(weights)
        dropped, d_weights = weights * factor, d_weights * factor
    wide = d_weights.dtype
    dv = _product_of_rows(dropped.astype(grad.dtype), grad)
    delta = jnp.sum(grad.astype(wide) * out.astype(wide), -1, keepdims=True)
    d_scores = weights * (d_weights - delta)
    narrow = d_scores.astype(q.dtype)
    factor = jnp.asarray(scale, wide)
    dq = _product(narrow, k, 2) * factor
    dk = _product_of_rows(narrow, q) * factor
    return dq, dk, dv, d_scores


def _block(shape, keys):
    """How many query rows to take at once."""
    batch, heads, groups, rows, _ = shape
    if batch * heads * groups * rows * keys <= _SCORES:
        return rows
    return max(1, min(rows, _SCORES // max(1, batch * heads * groups * keys)))


def _cut(x, block, axis=3):
    """Pads an axis to whole blocks and brings the blocks to the front; an axis of 1 (or nothing) stays shared."""
    count = -(-x.shape[axis] // block)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, count * block - x.shape[axis])
    x = jnp.pad(x, pad)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1:]), axis, 0)


def _join(x, rows, axis=3):
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2:])
    return lax.slice_in_dim(x, 0, rows, axis=axis)


def _split(x, block):
    """The part of a mask that goes with each block, or None when all blocks share it."""
    return None if x is None or x.shape[3] == 1 else _cut(x, block)


def _shared(mask):
    """A mask that all heads share, as (1 or B, Lq, Lk)."""
    return None if mask is None else mask[:, 0, 0]


def _prepare(query, key, value, attn_mask, keep):
    all_heads = query.shape[-3] if query.ndim > 2 else 1
    heads = key.shape[-3] if key.ndim > 2 else 1
    lead = query.shape[:-3]
    mask = None if attn_mask is None else _fold_mask(attn_mask, lead, all_heads, heads)
    keep = None if keep is None else _fold_mask(keep, lead, all_heads, heads)
    k, v = (x.reshape(-1, heads, *x.shape[-2:]) for x in (key, value))
    return _fold(query, heads), k, v, mask, keep


@lowering("tpu.sdpa.default")
def sdpa(query, key, value, attn_mask, keep, dropout_p, is_causal, scale):
    wide = accumulator(query.dtype)
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        return (jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype),
                jnp.full(query.shape[:-1], -jnp.inf, wide))
    q, k, v, mask, keep = _prepare(query, key, value, attn_mask, keep)
    rows, block = q.shape[3], _block(q.shape, k.shape[2])
    if flash.serves(query, key, value, attn_mask, keep):
        out, logsumexp = flash.forward(q, k, v, _shared(mask), is_causal, scale)
    elif block == rows:
        out, logsumexp = _attend(q, k, v, mask, keep, dropout_p, is_causal, scale, 0)
    else:
        masks, keeps = _split(mask, block), _split(keep, block)

        def step(xs):
            qs, m, d, first = xs
            return _attend(qs, k, v, mask if masks is None else m, d, dropout_p, is_causal, scale, first)

        parts = _cut(q, block)
        starts = jnp.arange(parts.shape[0], dtype=jnp.int32) * block
        outs, sums = lax.map(step, (parts, masks, keeps, starts))
        out, logsumexp = _join(outs, rows), _join(sums, rows)
    return out.reshape(*query.shape[:-1], value.shape[-1]).astype(query.dtype), logsumexp.reshape(query.shape[:-1])


@lowering("tpu.sdpa_backward.default")
def sdpa_backward(grad, query, key, value, output, logsumexp, attn_mask, keep, dropout_p, is_causal, scale,
                  grad_mask):
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        mask = jnp.zeros(attn_mask.shape, attn_mask.dtype) if grad_mask else jnp.zeros((0,), query.dtype)
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value), mask
    q, k, v, mask, keep = _prepare(query, key, value, attn_mask, keep)
    heads = k.shape[1]
    g, o = _fold(grad, heads), _fold(output, heads)
    sums = logsumexp.reshape(q.shape[:-1])
    rows, block = q.shape[3], _block(q.shape, k.shape[2])
    if flash.serves(query, key, value, attn_mask, keep, grad_mask):
        dq, dk, dv = flash.backward(g, q, k, v, o, sums, _shared(mask), is_causal, scale)
    elif block == rows or grad_mask:
        dq, dk, dv, d_scores = _gradients(g, q, k, v, o, sums, mask, keep, dropout_p, is_causal, scale, 0)
    else:
        masks, keeps = _split(mask, block), _split(keep, block)

        def step(carry, xs):
            gs, qs, os, ss, m, d, first = xs
            dq, dk, dv, _ = _gradients(gs, qs, k, v, os, ss, mask if masks is None else m, d, dropout_p, is_causal,
                                       scale, first)
            return (carry[0] + dk, carry[1] + dv), dq

        parts = [_cut(x, block) for x in (g, q, o, sums)]
        starts = jnp.arange(parts[0].shape[0], dtype=jnp.int32) * block
        wide = accumulator(q.dtype)
        (dk, dv), dqs = lax.scan(step, (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)),
                                 (*parts, masks, keeps, starts))
        dq = _join(dqs, rows)
    d_mask = jnp.zeros((0,), query.dtype)
    if grad_mask:
        def spread(m):
            return jnp.broadcast_to(_fold_mask(m, query.shape[:-3], q.shape[1] * q.shape[2], heads), d_scores.shape)

        d_mask = jax.linear_transpose(spread, jax.ShapeDtypeStruct(attn_mask.shape, d_scores.dtype))(d_scores)[0]
        d_mask = d_mask.astype(attn_mask.dtype)
    return (dq.reshape(query.shape).astype(query.dtype), dk.reshape(key.shape).astype(key.dtype),
            dv.reshape(value.shape).astype(value.dtype), d_mask)


def _rows_and_heads(query, key, value, grouped):
    """Leading dimensions made equal, and one number of key and value heads."""
    keep = 1 if grouped and min(query.ndim, key.ndim, value.ndim) >= 3 else 0
    if keep and key.shape[-3] != value.shape[-3]:
        key, value = (jnp.repeat(x, query.shape[-3] // x.shape[-3], axis=-3) for x in (key, value))
    parts = (query, key, value)
    lead = jnp.broadcast_shapes(*(x.shape[:x.ndim - 2 - keep] for x in parts))
    return [jnp.broadcast_to(x, (*lead, *x.shape[x.ndim - 2 - keep:])) for x in parts]


@lowering("aten.scaled_dot_product_attention.default", random=True)
def attention(query, key_, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False,
              key):
    """As graphs traced in inference mode hold it; elsewhere it has become tpu::sdpa."""
    query, key_, value = _rows_and_heads(query, key_, value, enable_gqa)
    keep = None
    if dropout_p > 0:
        rng = jax.random.wrap_key_data(key, impl="threefry2x32")
        keep = jax.random.bernoulli(rng, 1 - dropout_p, (*query.shape[:-1], key_.shape[-2]))
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    return sdpa(query, key_, value, attn_mask, keep, dropout_p, is_causal, scale)[0]
