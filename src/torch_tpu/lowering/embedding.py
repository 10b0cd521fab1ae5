"""Rows of a table by number."""

from __future__ import annotations

import jax.numpy as jnp

from . import promotion
from .axes import narrow
from .table import lowering


@lowering("aten.embedding.default")
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return jnp.take(weight, narrow(indices, weight.shape[0]), axis=0, mode="clip")


@lowering("aten.embedding_dense_backward.default")
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    rows = narrow(indices, num_weights).reshape(-1)
    grad = promotion.wide(grad_output).reshape(rows.shape[0], -1)
    if padding_idx >= 0:
        rows = jnp.where(rows == padding_idx, num_weights, rows)  # outside: dropped
    if scale_grad_by_freq:
        count = jnp.zeros((num_weights,), grad.dtype).at[rows].add(1, mode="drop")
        grad = grad / jnp.take(count, rows, mode="clip")[:, None]
    result = jnp.zeros((num_weights, grad_output.shape[-1]), grad.dtype)
    return result.at[rows].add(grad, mode="drop", wrap_negative_indices=False).astype(grad_output.dtype)


@lowering("aten.embedding_renorm.default")
def embedding_renorm(self, indices, max_norm, norm_type):
    rows = narrow(indices, self.shape[0]).reshape(-1)
    picked = promotion.wide(jnp.take(self, rows, axis=0, mode="clip"))
    norm = jnp.linalg.norm(picked, norm_type, axis=1, keepdims=True)
    # 1e-7 is torch's own guard; a row named twice is scaled once, because both writes carry the same values
    scaled = jnp.where(norm > max_norm, picked * (max_norm / (norm + 1e-7)), picked)
    return self.at[rows].set(scaled.astype(self.dtype), mode="drop", wrap_negative_indices=False)


SUM, MEAN, MAX = 0, 1, 2


@lowering("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(weight, indices, offsets, scale_grad_by_freq=False, mode=SUM, sparse=False,
                  per_sample_weights=None, include_last_offset=False, padding_idx=-1):
    if sparse:
        raise NotImplementedError("sparse gradients of embedding_bag are not supported; pass sparse=False")
    bags, count, width = offsets.shape[0] - int(include_last_offset), indices.shape[0], weight.shape[1]
    rows = narrow(indices, weight.shape[0])
    starts = narrow(offsets, count + 1)[:bags]
    # the first bag starts at 0 whatever its offset says; an empty bag shares its start with the next one
    bag = jnp.cumsum(jnp.zeros((count,), jnp.int32).at[starts[1:]].add(1, mode="drop"), dtype=jnp.int32)
    kept = jnp.ones((count,), bool) if padding_idx < 0 else rows != padding_idx
    slot = jnp.where(kept, bag, bags)
    size = jnp.zeros((bags,), jnp.int32).at[slot].add(1, mode="drop")
    picked = promotion.wide(jnp.take(weight, rows, axis=0, mode="clip"))
    if per_sample_weights is not None:
        picked = picked * per_sample_weights.astype(picked.dtype)[:, None]
    winners = jnp.zeros((0,), indices.dtype)
    if mode == MAX:
        out, winners = _max_of_bags(picked, rows, slot, bags)
        winners = winners.astype(indices.dtype)
    else:
        out = jnp.zeros((bags, width), picked.dtype).at[slot].add(picked, mode="drop")
        if mode == MEAN:
            out = out / jnp.maximum(size, 1).astype(out.dtype)[:, None]
    return (out.astype(weight.dtype), bag.astype(indices.dtype),
            jnp.pad(size, (0, int(include_last_offset))).astype(indices.dtype), winners)


def _max_of_bags(picked, rows, slot, bags):
    """The maximum of each bag, 0 for an empty one, and the row of the table it came from, -1 for an empty one."""
    width, count = picked.shape[1], picked.shape[0]
    best = jnp.full((bags, width), -jnp.inf, picked.dtype).at[slot].max(picked, mode="drop")
    wins = (picked == jnp.take(best, slot, axis=0, mode="clip")) & (slot < bags)[:, None]
    order = jnp.where(wins, jnp.arange(count, dtype=jnp.int32)[:, None], count)
    first = jnp.full((bags, width), count, jnp.int32).at[slot].min(order, mode="drop")
    found = first < count
    winner = jnp.where(found, jnp.take(rows, first, mode="clip"), -1) if count else jnp.full(first.shape, -1)
    return jnp.where(found, best, 0), winner


@lowering("aten._embedding_bag_backward.default")
def embedding_bag_backward(grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights,
                           scale_grad_by_freq, mode, sparse, per_sample_weights, padding_idx=-1):
    if sparse:
        raise NotImplementedError("sparse gradients of embedding_bag are not supported; pass sparse=False")
    return embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, maximum_indices, num_weights,
                                        scale_grad_by_freq, mode, per_sample_weights, padding_idx)


@lowering("aten._embedding_bag_dense_backward.default")
def embedding_bag_dense_backward(grad, indices, offset2bag, bag_size, maximum_indices, num_weights,
                                 scale_grad_by_freq, mode, per_sample_weights, padding_idx=-1):
    wide = promotion.wide(grad)
    result = jnp.zeros((num_weights, grad.shape[1]), wide.dtype)
    if mode == MAX:
        rows = jnp.where(maximum_indices < 0, num_weights, narrow(maximum_indices, num_weights))
        columns = jnp.broadcast_to(jnp.arange(grad.shape[1], dtype=jnp.int32), rows.shape)
        return result.at[rows, columns].add(wide, mode="drop").astype(grad.dtype)
    rows = narrow(indices, num_weights)
    parts = jnp.take(wide, narrow(offset2bag, grad.shape[0]), axis=0, mode="clip")
    if mode == MEAN:
        size = jnp.take(jnp.maximum(bag_size, 1), narrow(offset2bag, grad.shape[0]), mode="clip")
        parts = parts / size.astype(parts.dtype)[:, None]
    if per_sample_weights is not None:
        parts = parts * per_sample_weights.astype(parts.dtype)[:, None]
    if scale_grad_by_freq:
        count = jnp.zeros((num_weights,), parts.dtype).at[rows].add(1, mode="drop")
        parts = parts / jnp.take(count, rows, mode="clip")[:, None]
    if padding_idx >= 0:
        rows = jnp.where(rows == padding_idx, num_weights, rows)
    return result.at[rows].add(parts, mode="drop").astype(grad.dtype)


@lowering("aten._embedding_bag_per_sample_weights_backward.default")
def embedding_bag_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    rows = narrow(indices, weight.shape[0])
    parts = promotion.wide(jnp.take(grad, narrow(offset2bag, grad.shape[0]), axis=0, mode="clip"))
    result = (parts * jnp.take(weight, rows, axis=0, mode="clip").astype(parts.dtype)).sum(1)
    return jnp.where(rows == padding_idx, 0, result).astype(grad.dtype)
