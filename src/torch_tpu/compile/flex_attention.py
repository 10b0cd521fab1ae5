"""torch.nn.attention.flex_attention in a graph: scores, changed by `score_mod`, masked by `mask_mod`, and a softmax, as
one part of the program. Both functions are graphs over one element of the scores, and are mapped over all of them.

As PyTorch's own reference does, it computes every element and masks; the block mask's lists of blocks say the same.
When the scores would be too large to hold, queries go in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from ..lowering.matmul import dot
from . import lower

Node = torch.fx.Node

_forward, _backward = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
GRAPHS: dict[Any, tuple[int, ...]] = {_forward: (3,), _backward: (7,)}
_MASK: dict[Any, int] = {_forward: 4, _backward: 9}
_SCORES = 2**26  # held at once: 256 MB


def graph_nodes(node: Node) -> list[Any]:
    """The nodes of score_mod and mask_mod."""
    return [lower.argument(node, GRAPHS[node.target][0]), lower.argument(node, _MASK[node.target])[-1]]


def lower_node(node: Node, value: Callable[[Any], Any], body: Callable[[Any], Callable[..., Any]]) -> Any:
    """The results of the operator or of its gradient."""
    score_mod, mask_mod = (body(each) for each in graph_nodes(node))
    q, k, v = (value(lower.argument(node, position)) for position in range(3))
    scale, at = (5, 7) if node.target is _forward else (10, 12)
    factor = lower.argument(node, scale)
    score_buffers, mask_buffers = (value(node.args[i]) if len(node.args) > i else () for i in (at, at + 1))

    def attend(q: Any, k: Any, v: Any, *buffers: Any) -> Any:
        return _attend(q, k, v, factor, lambda *score: score_mod(*score, *buffers)[0],
                       lambda *place: mask_mod(*place, *mask_buffers)[0])

    if node.target is _forward:
        return list(attend(q, k, v, *score_buffers))
    grad, grad_logsumexp = value(lower.argument(node, 5)), value(lower.argument(node, 6))
    floats = [i for i, each in enumerate(score_buffers) if isinstance(each, jax.Array)
              and jnp.issubdtype(each.dtype, jnp.floating)]

    def of_floats(q: Any, k: Any, v: Any, *given: Any) -> Any:
        buffers = list(score_buffers)
        for i, each in zip(floats, given):
            buffers[i] = each
        return attend(q, k, v, *buffers)[:2]

    (out, logsumexp), pull = jax.vjp(of_floats, q, k, v, *(score_buffers[i] for i in floats))
    dq, dk, dv, *found = pull((jnp.zeros_like(out) if grad is None else grad.astype(out.dtype),
                               jnp.zeros_like(logsumexp) if grad_logsumexp is None
                               else grad_logsumexp.astype(logsumexp.dtype)))
    of_buffers: list[Any] = [None] * len(score_buffers)
    for i, each in zip(floats, found):
        of_buffers[i] = each
    return [dq, dk, dv, of_buffers]


def _attend(q: Any, k: Any, v: Any, scale: float, score_mod: Any, mask_mod: Any) -> tuple[Any, Any, Any]:
    """(out, logsumexp, largest scores); q (B, H, L, E), k (B or 1, K, M, E), v (B or 1, K, M, F), H a multiple of K."""
    batch, heads, rows = q.shape[:3]
    k, v = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (k, v))
    block = max(1, min(rows, _SCORES // max(1, batch * heads * k.shape[2])))
    if block == rows:
        return _rows(q, k, v, scale, score_mod, mask_mod, 0)
    count = -(-rows // block)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, count * block - rows), (0, 0)))
    parts = jnp.moveaxis(padded.reshape(batch, heads, count, block, q.shape[3]), 2, 0)
    step = jax.checkpoint(lambda xs: _rows(xs[0], k, v, scale, score_mod, mask_mod, xs[1]))
    made = lax.map(step, (parts, jnp.arange(count, dtype=jnp.int32) * block))
    out, *numbers = (jnp.moveaxis(x, 0, 2) for x in made)
    out = out.reshape(batch, heads, count * block, v.shape[3])[:, :, :rows]
    logsumexp, peak = (x.reshape(batch, heads, count * block)[:, :, :rows] for x in numbers)
    return out, logsumexp, peak


def _rows(q: Any, k: Any, v: Any, scale: float, score_mod: Any, mask_mod: Any, first: Any) -> tuple[Any, Any, Any]:
    batch, heads, rows = q.shape[:3]
    groups, columns = k.shape[1], k.shape[2]
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    folded = q.reshape(batch, groups, heads // groups * rows, q.shape[3])
    scores = dot(folded, k, ((3,), (3,)), ((0, 1), (0, 1)), wide).reshape(batch, heads, rows, columns)
    scores = scores * jnp.asarray(scale, wide)
    places = [jnp.arange(n, dtype=jnp.int32) for n in (batch, heads, rows, columns)]
    places[2] = places[2] + first
    scores = _over_all(score_mod, (0, 0, 0, 0))(scores, *places).astype(wide)
    allowed = _over_all(mask_mod, ())(*places)
    scores = jnp.where(allowed, scores, -jnp.inf)
    peak = jnp.max(scores, -1, keepdims=True)
    base = jnp.where(jnp.isneginf(peak), jnp.zeros((), wide), peak)
    weights = jnp.exp(scores - lax.stop_gradient(base))
    total = jnp.sum(weights, -1, keepdims=True)
    logsumexp = (base + jnp.log(total))[..., 0]
    weights = weights / jnp.where(total == 0, jnp.ones((), wide), total)
    weights = weights.astype(q.dtype).reshape(batch, groups, heads // groups * rows, columns)
    out = dot(weights, v, ((3,), (2,)), ((0, 1), (0, 1)), wide)
    two = jnp.asarray(math.log(2), wide)  # the operator's numbers are in powers of two
    return out.reshape(batch, heads, rows, v.shape[3]).astype(q.dtype), logsumexp / two, peak[..., 0] / two


def _over_all(function: Any, lead: tuple[int, ...]) -> Any:
    """A function of one place (batch, head, row, column), and of the score there where `lead` is given, over all."""
    for dimension in reversed(range(4)):
        places: list[int | None] = [None] * 4
        places[dimension] = 0
        function = jax.vmap(function, (0, *places) if lead else tuple(places))
    return function

