"""Attention over long sequences on TPUs, without its scores in memory: a Pallas kernel forward, two backward.

The arithmetic is that of attention.py: scores and sums in float32, rows without any key give zeros. Queries of one key
and value head are one block of rows, so a mask, which all heads share, is read once for each of those heads. Blocks of
keys that causality hides are neither read nor computed.

Shapes: q (B, K, G, L, D), k (B, K, M, D), v (B, K, M, Dv), mask (1 or B, L or 1, M or 1), with K heads of keys and
values, each of G heads of queries.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..runtime import jax_door, pallas_door
from . import context

_ROWS, _KEYS = 512, 512  # of a block of scores: 1 MiB in float32
_LANES = 128
_TYPES = (jnp.bfloat16, jnp.float32)


class _Plan(NamedTuple):
    """Sizes of one attention, and how it is cut.

    Attributes:
        rows, keys: of a block; rows are of each of the `groups` heads.
    """

    groups: int
    length: int
    keys_length: int
    rows: int
    keys: int
    scale: float
    causal: bool
    masked: bool
    precision: Any

    @property
    def row_blocks(self) -> int:
        return -(-self.length // self.rows)

    @property
    def key_blocks(self) -> int:
        return -(-self.keys_length // self.keys)


def serves(query, key, value, attn_mask, keep, grad_mask=False) -> bool:
    """Whether the program is for a TPU, and the scores are so many that they would go through its memory."""
    if context.platform_name() != "tpu" or keep is not None or grad_mask or query.dtype not in _TYPES:
        return False
    if context.divided() or query.shape[-2] < _LANES:
        return False  # XLA does not divide a kernel among chips; few rows have few scores for each key that is read
    if query.dtype != key.dtype or query.ndim < 3 or max(query.shape[-1], value.shape[-1]) > 256:
        return False
    if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] != 1:
        return False  # a mask of each head
    if query.shape[-3] // key.shape[-3] > _ROWS // 16:
        return False
    return 4 * math.prod(query.shape[:-1]) * key.shape[-2] >= context.flash_bytes()


def _plan(q, k, mask, is_causal, scale) -> _Plan:
    groups, length, keys = q.shape[2], q.shape[3], k.shape[2]
    rows = max(16, 1 << ((_ROWS // groups).bit_length() - 1))
    precision = context.precision() if q.dtype == jnp.float32 else None
    return _Plan(groups, length, keys, min(rows, _up(length, 16)), min(_KEYS, _up(keys, _LANES)), float(scale),
                 bool(is_causal), mask is not None, precision)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _pad(x, axis: int, size: int):
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad) if size != x.shape[axis] else x


def _mask(mask, plan: _Plan):
    """(1 or B, L, M) in whole blocks; True and False as int8."""
    if mask is None:
        return []
    if mask.dtype == bool:
        mask = mask.astype(jnp.int8)
    elif mask.dtype != jnp.float32:
        mask = mask.astype(jnp.float32)
    mask = jnp.broadcast_to(mask, (mask.shape[0], plan.length, plan.keys_length))
    return [_pad(_pad(mask, 1, plan.row_blocks * plan.rows), 2, plan.key_blocks * plan.keys)]


def _dot(a, b, contract, plan: _Plan):
    return lax.dot_general(a, b, (contract, ((), ())), precision=plan.precision, preferred_element_type=jnp.float32)


def _row(column):
    """(n, 1) -> (1, n), through whole tiles."""
    return jnp.broadcast_to(column, (column.shape[0], _LANES)).T[:1]


def _column(row):
    """(1, n) -> (n, 1)."""
    return jnp.broadcast_to(row, (_LANES, row.shape[1])).T[:, :1]


def _scores(q, k, mask, plan: _Plan, row, column):
    """(groups * rows, keys), -inf where hidden. `row`, `column`: the first of the block."""
    scores = _dot(q, k, ((1,), (1,)), plan) * jnp.float32(plan.scale)
    shape = (plan.groups, plan.rows, plan.keys)
    scores = scores.reshape(shape)
    columns = column + lax.broadcasted_iota(jnp.int32, shape, 2)
    seen = columns < plan.keys_length
    if plan.causal:
        seen &= row + lax.broadcasted_iota(jnp.int32, shape, 1) >= columns
    if mask is not None:
        if mask.dtype == jnp.int8:
            seen &= jnp.broadcast_to((mask.astype(jnp.int32) != 0)[None], shape)
        else:
            scores = scores + mask[None]
    return jnp.where(seen, scores, -jnp.inf).reshape(plan.groups * plan.rows, plan.keys)


def _finite(peak):
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def _reaches(plan: _Plan, row_block, key_block):
    """Whether causality lets a block of rows see a block of keys."""
    return (row_block + 1) * plan.rows > key_block * plan.keys if plan.causal else True


def _seen(plan: _Plan, mask, row_block, key_block):
    """Whether a block of scores has one that counts. Masks are often causal themselves."""
    reaches = _reaches(plan, row_block, key_block)
    if mask is None or mask.dtype != jnp.int8:
        return reaches
    return jnp.logical_and(reaches, jnp.max(mask[0].astype(jnp.int32)) > 0)


def _refs(plan: _Plan, refs):
    """q, k, v, mask or None, and the rest."""
    if plan.masked:
        return refs[:4], refs[4:]
    return (*refs[:3], None), refs[3:]


def _blocks(refs, plan: _Plan):
    q, k, v, mask = refs
    return (q[0, 0].reshape(plan.groups * plan.rows, -1), k[0, 0], v[0, 0], None if mask is None else mask[0])


def _forward_kernel(plan: _Plan, *refs):
    from jax.experimental import pallas as pl

    inputs, (out, sums, peak, total, acc) = _refs(plan, refs)
    row_block, key_block = pl.program_id(2), pl.program_id(3)

    @pl.when(key_block == 0)
    def _():
        peak[...] = jnp.full(peak.shape, -jnp.inf, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(_seen(plan, inputs[3], row_block, key_block))
    def _():
        q, k, v, mask = _blocks(inputs, plan)
        scores = _scores(q, k, mask, plan, row_block * plan.rows, key_block * plan.keys)
        before = peak[:, :1]
        now = jnp.maximum(before, jnp.max(scores, 1, keepdims=True))
        weights = jnp.exp(scores - _finite(now))
        shrink = jnp.exp(before - _finite(now))
        total[...] = jnp.broadcast_to(shrink * total[:, :1] + jnp.sum(weights, 1, keepdims=True), total.shape)
        acc[...] = shrink * acc[...] + _dot(weights.astype(v.dtype), v, ((1,), (0,)), plan)
        peak[...] = jnp.broadcast_to(now, peak.shape)

    @pl.when(key_block == plan.key_blocks - 1)
    def _():
        sum_ = total[:, :1]
        out[0, 0] = (acc[...] / jnp.where(sum_ == 0, 1.0, sum_)).reshape(out.shape[2:]).astype(out.dtype)
        sums[0, 0, 0] = _row(_finite(peak[:, :1]) + jnp.log(sum_))


def _weights_and_scores_gradient(plan: _Plan, q, k, v, mask, grad, sums, delta, row_block, key_block):
    scores = _scores(q, k, mask, plan, row_block * plan.rows, key_block * plan.keys)
    weights = jnp.exp(scores - _finite(_column(sums)))
    d_weights = _dot(grad, v, ((1,), (1,)), plan)
    return weights, weights * (d_weights - _column(delta))


def _backward_keys_kernel(plan: _Plan, *refs):
    from jax.experimental import pallas as pl

    inputs, (grad, sums, delta, dk, dv, dk_acc, dv_acc) = _refs(plan, refs)
    key_block, row_block = pl.program_id(2), pl.program_id(3)

    @pl.when(row_block == 0)
    def _():
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)

    @pl.when(_seen(plan, inputs[3], row_block, key_block))
    def _():
        q, k, v, mask = _blocks(inputs, plan)
        g = grad[0, 0].reshape(plan.groups * plan.rows, -1)
        weights, d_scores = _weights_and_scores_gradient(plan, q, k, v, mask, g, sums[0, 0, 0], delta[0, 0, 0],
                                                         row_block, key_block)
        dv_acc[...] += _dot(weights.astype(g.dtype), g, ((0,), (0,)), plan)
        dk_acc[...] += _dot(d_scores.astype(q.dtype), q, ((0,), (0,)), plan)

    @pl.when(row_block == plan.row_blocks - 1)
    def _():
        dk[0, 0] = (dk_acc[...] * jnp.float32(plan.scale)).astype(dk.dtype)
        dv[0, 0] = dv_acc[...].astype(dv.dtype)


def _backward_queries_kernel(plan: _Plan, *refs):
    from jax.experimental import pallas as pl

    inputs, (grad, sums, delta, dq, acc) = _refs(plan, refs)
    row_block, key_block = pl.program_id(2), pl.program_id(3)

    @pl.when(key_block == 0)
    def _():
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(_seen(plan, inputs[3], row_block, key_block))
    def _():
        q, k, v, mask = _blocks(inputs, plan)
        g = grad[0, 0].reshape(plan.groups * plan.rows, -1)
        _, d_scores = _weights_and_scores_gradient(plan, q, k, v, mask, g, sums[0, 0, 0], delta[0, 0, 0], row_block,
                                                   key_block)
        acc[...] += _dot(d_scores.astype(k.dtype), k, ((1,), (0,)), plan)

    @pl.when(key_block == plan.key_blocks - 1)
    def _():
        dq[0, 0] = (acc[...] * jnp.float32(plan.scale)).reshape(dq.shape[2:]).astype(dq.dtype)


class _Specs:
    """Which block of each array a step of the grid takes. `by_keys`: blocks of keys are the outer loop."""

    def __init__(self, plan: _Plan, dims, by_keys: bool) -> None:
        from jax.experimental import pallas as pl

        self.pl, self.plan, self.dims, self.by_keys = pl, plan, dims, by_keys

    def _spec(self, shape, index):
        plan, by_keys = self.plan, self.by_keys

        def place(b, h, outer, inner):
            row, key = (inner, outer) if by_keys else (outer, inner)
            if plan.causal and by_keys:  # blocks of rows before the first that sees these keys are not read
                row = jnp.maximum(row, lax.div(key * plan.keys, plan.rows))
                row = jnp.minimum(row, plan.row_blocks - 1)
            elif plan.causal:
                key = jnp.minimum(key, lax.div((row + 1) * plan.rows - 1, plan.keys))
            return index(b, h, row, key)

        return self.pl.BlockSpec(shape, place)

    def queries(self, width):
        return self._spec((1, 1, self.plan.groups, self.plan.rows, width), lambda b, h, r, c: (b, h, 0, r, 0))

    def keys(self, width):
        return self._spec((1, 1, self.plan.keys, width), lambda b, h, r, c: (b, h, c, 0))

    def mask(self, batched):
        return self._spec((1, self.plan.rows, self.plan.keys), lambda b, h, r, c: (b if batched else 0, r, c))

    def sums(self):
        return self._spec((1, 1, 1, 1, self.plan.groups * self.plan.rows), lambda b, h, r, c: (b, h, r, 0, 0))

    def inputs(self, masks):
        width, width_v = self.dims
        return [self.queries(width), self.keys(width), self.keys(width_v), *(self.mask(m.shape[0] > 1) for m in masks)]


def _cost(plan: _Plan, products, by_keys, grid, in_specs, arguments, out_shape):
    """What XLA is told of a kernel, which it cannot look into. Blocks that go with the inner loop are read at each turn
    of the outer one.

    Args:
        products: widths of the matrix products over one block of scores.
        by_keys: blocks of keys are the outer loop.
    """
    from jax.experimental import pallas as pl

    pairs = sum(1 for r in range(plan.row_blocks) for c in range(plan.key_blocks) if _reaches(plan, r, c))
    steps = grid[0] * grid[1] * pairs
    scores = plan.groups * plan.rows * plan.keys
    of_keys = {1, 2}
    inner = {at for at in range(len(arguments)) if (at in of_keys) != by_keys}
    if plan.masked:
        inner.add(3)
    moved = sum(math.prod(spec.block_shape) * x.dtype.itemsize * (steps if at in inner else math.prod(grid[:3]))
                for at, (spec, x) in enumerate(zip(in_specs, arguments)))
    moved += sum(math.prod(o.shape) * o.dtype.itemsize for o in out_shape)
    return pl.CostEstimate(flops=2 * steps * scores * sum(products), transcendentals=steps * scores,
                           bytes_accessed=moved)


def _call(kernel, plan: _Plan, products, grid, in_specs, out_specs, out_shape, scratch, arguments):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    pallas_door.install_if_used()
    order = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=0, grid=grid, in_specs=in_specs, out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch])
    cost = _cost(plan, products, kernel is _backward_keys_kernel, grid, in_specs, arguments, out_shape)
    return pl.pallas_call(functools.partial(kernel, plan), grid_spec=spec, out_shape=out_shape, compiler_params=order,
                          cost_estimate=cost, name="flash" + kernel.__name__)(*arguments)


def forward(q, k, v, mask, is_causal, scale):
    """Output (B, K, G, L, Dv) and the logarithms of the softmax denominators (B, K, G, L), float32."""
    with jax_door.width(False):
        plan = _plan(q, k, mask, is_causal, scale)
        batch, heads, groups, length, width = q.shape
        width_v = v.shape[-1]
        masks = _mask(mask, plan)
        specs = _Specs(plan, (width, width_v), False)
        rows, keys, block = plan.row_blocks * plan.rows, plan.key_blocks * plan.keys, groups * plan.rows
        out, sums = _call(
            _forward_kernel, plan, (width, width_v), (batch, heads, plan.row_blocks, plan.key_blocks),
            specs.inputs(masks), [specs.queries(width_v), specs.sums()],
            [jax.ShapeDtypeStruct((batch, heads, groups, rows, width_v), q.dtype),
             jax.ShapeDtypeStruct((batch, heads, plan.row_blocks, 1, block), jnp.float32)],
            [(block, _LANES), (block, _LANES), (block, width_v)],
            [_pad(q, 3, rows), _pad(k, 2, keys), _pad(v, 2, keys), *masks])
        sums = sums.reshape(batch, heads, plan.row_blocks, groups, plan.rows).transpose(0, 1, 3, 2, 4)
        return out[..., :length, :], sums.reshape(batch, heads, groups, rows)[..., :length]


def backward(grad, q, k, v, out, sums, mask, is_causal, scale):
    """Gradients of q, k, v, in their dtypes. `out` and `sums` as `forward` gives them."""
    with jax_door.width(False):
        plan = _plan(q, k, mask, is_causal, scale)
        batch, heads, groups, length, width = q.shape
        width_v = v.shape[-1]
        masks = _mask(mask, plan)
        rows, keys, block = plan.row_blocks * plan.rows, plan.key_blocks * plan.keys, groups * plan.rows
        delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), -1)

        def by_blocks(x):
            x = _pad(x.astype(jnp.float32), 3, rows).reshape(batch, heads, groups, plan.row_blocks, plan.rows)
            return x.transpose(0, 1, 3, 2, 4).reshape(batch, heads, plan.row_blocks, 1, block)

        arguments = [_pad(q, 3, rows), _pad(k, 2, keys), _pad(v, 2, keys), *masks, _pad(grad.astype(q.dtype), 3, rows),
                     by_blocks(sums), by_blocks(delta)]

        def in_specs(specs):
            return [*specs.inputs(masks), specs.queries(width_v), specs.sums(), specs.sums()]

        specs = _Specs(plan, (width, width_v), True)
        dk, dv = _call(
            _backward_keys_kernel, plan, (width, width_v, width, width_v),
            (batch, heads, plan.key_blocks, plan.row_blocks), in_specs(specs), [specs.keys(width), specs.keys(width_v)],
            [jax.ShapeDtypeStruct((batch, heads, keys, width), k.dtype),
             jax.ShapeDtypeStruct((batch, heads, keys, width_v), v.dtype)],
            [(plan.keys, width), (plan.keys, width_v)], arguments)
        specs = _Specs(plan, (width, width_v), False)
        dq, = _call(
            _backward_queries_kernel, plan, (width, width_v, width),
            (batch, heads, plan.row_blocks, plan.key_blocks), in_specs(specs), [specs.queries(width)],
            [jax.ShapeDtypeStruct((batch, heads, groups, rows, width), q.dtype)],
            [(block, width)], arguments)
        return dq[..., :length, :], dk[..., :plan.keys_length, :], dv[..., :plan.keys_length, :]
