"""Products of quantised matrices: int8 and int4 weights, and float8 with scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import context
from .grouped_matmul import grouped_mm
from .matmul import at_least_rows, dot, matmul
from .table import lowering

# XLA:CPU (jaxlib 0.10.2) fuses a conversion into no product: it writes a float copy of the whole weight. In blocks of
# so many elements the copy stays in the processor's cache, and memory is read as integers. Blocks of float32: a product
# of one row takes half the time of bfloat16's. From this length of a row on, its product with a transposed block is
# ten times slower.
_BLOCK = 1 << 19
_LONG_ROW = 4096
_FEW_ROWS = 16


def _few_rows_on_cpu(self):
    """Whether reading the weight is what takes the time, on a compiler that fuses nothing into a product."""
    return context.platform_name() != "tpu" and self.shape[0] <= _FEW_ROWS


@lowering("aten._weight_int8pack_mm.default")
def weight_int8pack_mm(self, mat2, scales):
    """self (M, K) times int8 weights (N, K), one scale for each row of weights. XLA:TPU fuses the conversion."""
    product = _in_blocks(self, mat2) if _few_rows_on_cpu(self) else matmul(self, mat2.astype(self.dtype).T)
    return product * scales.astype(product.dtype)


def _in_blocks(self, weight):
    """self (M, K) times int8 weights (N, K), of which only one block is there as floats. The last block may overlap the
    one before."""
    self = self.astype(jnp.float32)
    (rows, columns), outputs = self.shape, weight.shape[0]

    def product(block):
        if columns >= _LONG_ROW:
            return dot(self, block.astype(jnp.float32), ((1,), (1,)))
        return matmul(self, block.astype(jnp.float32).T)

    block = max(1, _BLOCK // max(columns, 1))
    if block >= outputs:
        return product(weight)

    def step(i, out):
        start = jnp.minimum(i * block, outputs - block)
        part = lax.dynamic_slice_in_dim(weight, start, block, 0)
        return lax.dynamic_update_slice_in_dim(out, product(part), start, 1)

    return lax.fori_loop(0, -(-outputs // block), step, jnp.zeros((rows, outputs), jnp.float32))


def _halves(packed):
    """The numbers in the upper and in the lower halves of int8 bytes, as int32: XLA:TPU shifts words, not bytes."""
    words = packed.astype(jnp.int32)
    return words >> 4, (words << 28) >> 28


@lowering("tpu.int4_mm.default")
def int4_mm(self, weight, scale):
    """self (M, K) times numbers of -8 to 7, two in each byte of `weight` (K / 2, N): rows 2k and 2k + 1 in the upper
    and the lower half of row k. `scale` (groups, N) is for K / groups rows each. No number moves to another lane."""
    (rows, columns), (groups, outputs) = self.shape, scale.shape
    narrow = self.dtype
    if context.platform_name() == "tpu" and rows <= _FEW_ROWS:
        return _groups_at_once(at_least_rows(self), weight, scale)[:rows].astype(narrow)
    if _few_rows_on_cpu(self):
        return _group_by_group(self.astype(jnp.float32), weight, scale.astype(jnp.float32)).astype(narrow)
    scale = jnp.broadcast_to(scale[:, None].astype(narrow), (groups, columns // 2 // groups, outputs))
    scale = scale.reshape(columns // 2, outputs)
    first, second = (matmul(self[:, half::2], q.astype(narrow) * scale) for half, q in enumerate(_halves(weight)))
    return (first + second).astype(narrow)


def _groups_at_once(self, weight, scale):
    """A product for each group, which then gets its scale. For few rows: the products are many times the result."""
    rows, groups = self.shape[0], scale.shape[0]
    self = self.reshape(rows, groups, -1, 2)
    dims = ((2,), (1,)), ((1,), (0,))
    product = sum(dot(self[..., half], q.reshape(groups, -1, q.shape[1]).astype(self.dtype), *dims)
                  for half, q in enumerate(_halves(weight)))
    return (product * scale[:, None].astype(product.dtype)).sum(0)


def _group_by_group(self, weight, scale):
    """As `_groups_at_once`, with the floats of one group in the processor's cache."""
    rows, (groups, outputs) = self.shape[0], scale.shape

    def step(total, part):
        x, packed, scale = part
        first, second = (matmul(x[..., half], q.astype(x.dtype)) for half, q in enumerate(_halves(packed)))
        return total + (first + second) * scale, None

    parts = self.reshape(rows, groups, -1, 2).transpose(1, 0, 2, 3), weight.reshape(groups, -1, outputs), scale
    return lax.scan(step, jnp.zeros((rows, outputs), self.dtype), parts)[0]


@lowering("aten._convert_weight_to_int4pack.default")
def convert_weight_to_int4pack(self, innerKTiles):
    """Bytes (N, K / 2) of two numbers of 0 to 15 each, the earlier one in the upper half, in the shape that PyTorch
    gives packed weights. What is where inside is a device's own matter: here what `int4_mm` takes, row after row."""
    rows, half = self.shape
    packed = (self ^ 0x88).T  # q - 8 in two's complement
    words = lax.bitcast_convert_type(packed.reshape(half, rows // 4, 4), jnp.int32)
    return words.reshape(rows // 8, 2 * half // (16 * innerKTiles), 32, innerKTiles // 2)


@lowering("aten._weight_int4pack_mm.default")
def weight_int4pack_mm(self, mat2, qGroupSize, qScaleAndZeros):
    """self (M, K) times packed numbers q of 0 to 15, weight = (q - 8) * scale + zero, with scale and zero
    (K / group, N, 2) for each group of columns."""
    rows, columns = 8 * mat2.shape[0], self.shape[1]
    packed = lax.bitcast_convert_type(mat2.reshape(columns // 2, rows // 4), jnp.int8).reshape(columns // 2, rows)
    zeros = qScaleAndZeros[..., 1].astype(jnp.float32)
    sums = self.astype(jnp.float32).reshape(self.shape[0], -1, qGroupSize).sum(2)
    product = int4_mm(self.astype(jnp.float32), packed, qScaleAndZeros[..., 0].astype(jnp.float32))
    return (product + matmul(sums, zeros)).astype(self.dtype)


def _scale(scale):
    """A scale as something that broadcasts against a matrix."""
    return scale.astype(jnp.float32).reshape(scale.shape if scale.ndim == 2 else (1, 1))


@lowering("aten._scaled_mm.default")
def scaled_mm(self, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    if scale_a.size not in (1, self.shape[0]) or scale_b.size not in (1, mat2.shape[1]):
        raise NotImplementedError("_scaled_mm with blockwise scales; use one scale a tensor, a row or a column")
    product = matmul(self.astype(jnp.float32), mat2.astype(jnp.float32))
    out = product * _scale(scale_a) * _scale(scale_b)
    if bias is not None:
        out = out + bias.astype(out.dtype)
    if scale_result is not None:
        out = out * scale_result.astype(out.dtype).reshape(())
    return out.astype(out_dtype or self.dtype)


@lowering("aten._scaled_grouped_mm.default")
def scaled_grouped_mm(self, mat2, scale_a, scale_b, offs=None, bias=None, scale_result=None, out_dtype=None,
                      use_fast_accum=False):
    if self.ndim != 2 or mat2.ndim != 3:
        raise NotImplementedError("_scaled_grouped_mm of other than a 2-D with a 3-D matrix")
    a = self.astype(jnp.float32) * scale_a.astype(jnp.float32)[:, None]
    b = mat2.astype(jnp.float32) * scale_b.astype(jnp.float32)[:, None, :]
    return grouped_mm(a, b, offs, bias, out_dtype or np.dtype(jnp.bfloat16))
