"""One matrix product per group of rows, for mixtures of experts."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from . import context, promotion
from .matmul import accumulator, dot, matmul
from .table import lowering


def _tiles(offs, count, tile):
    """Cuts each group into tiles of rows: how many tiles, and for tile i its group, first row and end."""
    ends = offs.astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    per_group = (ends - starts + tile - 1) // tile
    last = jnp.cumsum(per_group)

    def locate(i):
        group = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
        inside = i - (last[group] - per_group[group])
        return group, starts[group] + inside * tile, ends[group]

    return last[-1], locate


def _tile_size(rows, groups):
    """About half a mean group: small groups waste little, big ones still fill a matrix unit."""
    return max(1, min(128, 1 << max(0, (rows // max(groups, 1)).bit_length()), rows))


def _rows_loop(rows, experts, offs):
    """XLA:CPU expands ragged_dot to every row times every expert; a loop over tiles does only the work there is."""
    tile = _tile_size(rows.shape[0], experts.shape[0])
    padded = jnp.pad(rows, ((0, tile), (0, 0)))
    count, locate = _tiles(offs, rows.shape[0], tile)
    out = jnp.zeros((padded.shape[0], experts.shape[2]), accumulator(rows.dtype))

    def step(i, out):
        group, first, end = locate(i)
        part = lax.dynamic_slice_in_dim(padded, first, tile)
        weight = lax.dynamic_index_in_dim(experts, group, keepdims=False)
        product = dot(part, weight, ((1,), (0,)))
        held = lax.dynamic_slice_in_dim(out, first, tile)
        inside = (first + jnp.arange(tile, dtype=jnp.int32) < end)[:, None]
        return lax.dynamic_update_slice_in_dim(out, jnp.where(inside, product, held), first, 0)

    return lax.fori_loop(0, count, step, out)[:rows.shape[0]]


def _sizes(offs):
    return jnp.diff(offs.astype(jnp.int32), prepend=jnp.zeros((1,), jnp.int32))


def _rows_ragged(rows, experts, offs):
    precision = context.precision() if rows.dtype == jnp.float32 else None
    return lax.ragged_dot(rows, experts, _sizes(offs), precision=precision,
                          preferred_element_type=accumulator(rows.dtype))


def rows_by_group(rows, experts, offs):
    """(M, K) rows, (E, K, N) experts, (E,) ends of the groups -> (M, N); rows beyond the last end are 0."""
    if rows.shape[0] == 0:
        return jnp.zeros((0, experts.shape[2]), accumulator(rows.dtype))
    return lax.platform_dependent(rows, experts, offs, cpu=_rows_loop, default=_rows_ragged)


def contract_by_group(left, right, offs):
    """(M, K), (K, N), (E,) ends of the groups of K -> (E, M, N)."""
    groups = offs.shape[0]
    tile = _tile_size(left.shape[1], groups)
    count, locate = _tiles(offs, left.shape[1], tile)
    left, right = jnp.pad(left, ((0, 0), (0, tile))), jnp.pad(right, ((0, tile), (0, 0)))
    out = jnp.zeros((groups, left.shape[0], right.shape[1]), accumulator(left.dtype))

    def step(i, out):
        group, first, end = locate(i)
        inside = first + jnp.arange(tile, dtype=jnp.int32) < end
        a = jnp.where(inside, lax.dynamic_slice_in_dim(left, first, tile, axis=1), jnp.zeros((), left.dtype))
        b = jnp.where(inside[:, None], lax.dynamic_slice_in_dim(right, first, tile), jnp.zeros((), right.dtype))
        held = lax.dynamic_index_in_dim(out, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, held + dot(a, b, ((1,), (0,))), group, 0)

    return lax.fori_loop(0, count, step, out)


@lowering("tpu.grouped_mm.default")
def grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
    if self.ndim == 3 and mat2.ndim == 3:
        out = matmul(self, mat2)
    elif self.ndim == 2 and mat2.ndim == 3:
        out = rows_by_group(self, mat2, offs)
    elif self.ndim == 3:
        out = jnp.swapaxes(rows_by_group(mat2.T, jnp.swapaxes(self, 1, 2), offs), 0, 1)
    else:
        out = contract_by_group(self, mat2, offs)
    if bias is not None:
        out = out + promotion.cast(bias, out.dtype)
    return out.astype(out_dtype or self.dtype)
