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
