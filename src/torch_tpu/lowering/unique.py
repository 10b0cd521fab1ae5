"""Distinct elements and rows, at a fixed size: results are padded to the input's, next to how many are real."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .axes import index_dtype


def unique(x):
    """(values, inverse, counts, how many) of a value's sorted distinct elements. nan differs from itself."""
    flat = x.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    values, group, counts, count = _runs(jnp.take(flat, order))
    return values, jnp.zeros_like(group).at[order].set(group).reshape(x.shape), counts, count


def unique_consecutive(x):
    """As `unique`, of runs of equal neighbours."""
    values, group, counts, count = _runs(x.reshape(-1))
    return values, group.reshape(x.shape), counts, count


def unique_rows(x):
    """As `unique`, of the slices along the first dimension, in lexicographic order."""
    rows = x.reshape(x.shape[0], -1)
    n, kind = rows.shape[0], index_dtype(rows.shape[0])

    def refine(group, column):
        # rows equal so far stay together; the next column orders them and splits them
        group, column, place = lax.sort((group, column, lax.iota(kind, n)), num_keys=2)
        fresh = (group[1:] != group[:-1]) | (column[1:] != column[:-1])
        ranks = jnp.concatenate([jnp.zeros((1,), kind), jnp.cumsum(fresh, dtype=kind)])
        return jnp.zeros((n,), kind).at[place].set(ranks), None

    group, _ = lax.scan(refine, jnp.zeros((n,), kind), rows.T)
    return _collect(x, group)


def unique_consecutive_rows(x):
    """As `unique_rows`, of runs of equal neighbours."""
    rows = x.reshape(x.shape[0], -1)
    return _collect(x, _groups((rows[1:] != rows[:-1]).any(1)))


def _groups(fresh):
    kind = index_dtype(fresh.shape[0] + 1)
    return jnp.concatenate([jnp.zeros((1,), kind), jnp.cumsum(fresh, dtype=kind)])


def _runs(flat):
    return _collect(flat, _groups(flat[1:] != flat[:-1]))


def _collect(x, group):
    counts = jnp.zeros(group.shape, jnp.int64).at[group].add(1)
    return jnp.zeros_like(x).at[group].set(x), group.astype(jnp.int64), counts, group.max() + 1
