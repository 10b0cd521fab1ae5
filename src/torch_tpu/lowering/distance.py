"""Distances between rows: cdist, pdist, and their gradients."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from .matmul import matmul
from .table import lowering


def _reduce(diff, p):
    """The p-norm over the last dimension."""
    size = jnp.abs(diff)
    if diff.shape[-1] == 0:
        return jnp.zeros(diff.shape[:-1], diff.dtype)
    if p == 0:
        return jnp.sum((diff != 0).astype(diff.dtype), -1)
    if p == 1:
        return jnp.sum(size, -1)
    if p == 2:
        return jnp.sqrt(jnp.sum(diff * diff, -1))
    if math.isinf(p):
        return jnp.max(size, -1)
    return jnp.sum(size ** p, -1) ** (1 / p)


def _slope(grad, diff, dist, p):
    """d(norm)/d(diff) times grad, 0 where PyTorch says so; grad and dist lack diff's last dimension."""
    grad, dist = grad[..., None], dist[..., None]
    zero = jnp.zeros((), diff.dtype)
    sign = jnp.sign(diff)
    if p == 0:
        return jnp.zeros_like(diff)
    if p == 1:
        return grad * sign
    if math.isinf(p):
        return grad * sign * (jnp.abs(diff) == dist).astype(diff.dtype)
    safe = jnp.where(dist == 0, jnp.ones((), diff.dtype), dist)
    if p == 2:
        return jnp.where(dist == 0, zero, grad * diff / safe)
    size = jnp.where(diff == 0, jnp.ones((), diff.dtype), jnp.abs(diff))
    return jnp.where((dist == 0) | (diff == 0), zero, sign * size ** (p - 1) * grad / safe ** (p - 1))


def _by_product(x1, x2):
    """Euclidean distances from one matrix product: PyTorch's choice for many rows."""
    squared = (jnp.sum(x1 * x1, -1)[..., :, None] + jnp.sum(x2 * x2, -1)[..., None, :] - 2 * matmul(x1, x2.mT))
    return jnp.sqrt(jnp.maximum(squared, 0))


@lowering("aten._cdist_forward.default")
def cdist(x1, x2, p, compute_mode):
    lead = jnp.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    x1, x2 = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (x1, x2))
    many = x1.shape[-2] > 25 or x2.shape[-2] > 25
    if p == 2 and (compute_mode == 1 or (compute_mode in (None, 0) and many)):
        return _by_product(x1, x2)
    return _reduce(x1[..., :, None, :] - x2[..., None, :, :], p)


@lowering("aten._cdist_backward.default")
def cdist_backward(grad, x1, x2, p, cdist):
    shape = x1.shape
    if 0 in grad.shape or 0 in shape:
        return jnp.zeros_like(x1)  # in x1's own shape, which PyTorch keeps here and not below
    lead = jnp.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    x1, x2 = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (x1, x2))
    slope = _slope(grad, x1[..., :, None, :] - x2[..., None, :, :], cdist, p)
    return jnp.sum(slope, -2).reshape(*lead, *shape[-2:])


def _pairs(count):
    return np.triu_indices(count, 1)


@lowering("aten._pdist_forward.default")
def pdist(self, p=2.0):
    first, second = _pairs(self.shape[0])
    return _reduce(self[first] - self[second], p)


@lowering("aten._pdist_backward.default")
def pdist_backward(grad, self, p, pdist):
    first, second = _pairs(self.shape[0])
    slope = _slope(grad, self[first] - self[second], pdist, p)
    return jnp.zeros_like(self).at[first].add(slope).at[second].add(-slope)
