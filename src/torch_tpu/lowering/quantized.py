"""Products of quantised matrices: int8 and int4 weights, and float8 with scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import context
from .grouped_matmul import grouped_mm
from .matmul import matmul
from .table import lowering

# XLA:CPU (jaxlib 0.10.2) fuses a conversion into no product: it writes a float copy of the whole weight. In blocks of
# so many elements the copy stays in the processor's cache, and memory is read as integers. Blocks of bfloat16 are the
# faster ones, but from this length of a row on its products of one row are ten times as slow as those of float32.
_BLOCK = {"bfloat16": 1 << 18, "float32": 1 << 20}
_LONG_ROW = 4096
_FEW_ROWS = 16


def _by_rows_of_weights(self, widen, count, *weights):
    """self (M, K) times a weight of `count` rows, of which `widen(block, dtype)` makes a (K, n) matrix of floats.
    `weights` are its parts, each with the weight's rows as first dimension. Gives (M, count), accumulated wide."""
    if context.platform_name() == "tpu" or self.shape[0] > _FEW_ROWS:  # XLA:TPU fuses the conversion into the product
        return matmul(self, widen(weights, self.dtype))
    if self.dtype != jnp.bfloat16 or self.shape[1] >= _LONG_ROW:
        self = self.astype(jnp.float32)
    block = max(1, _BLOCK[self.dtype.name] // max(self.shape[1], 1))
    whole = count // block
    if whole < 2:
        return matmul(self, widen(weights, self.dtype))

    def step(_, part):
        return None, matmul(self, widen(part, self.dtype))

    blocks = tuple(w[:whole * block].reshape(whole, block, *w.shape[1:]) for w in weights)
    _, products = lax.scan(step, None, blocks)
    product = products.transpose(1, 0, 2).reshape(self.shape[0], whole * block)
    if whole * block == count:
        return product
    rest = matmul(self, widen(tuple(w[whole * block:] for w in weights), self.dtype))
    return jnp.concatenate([product, rest], 1)


@lowering("aten._weight_int8pack_mm.default")
def weight_int8pack_mm(self, mat2, scales):
    """self (M, K) times int8 weights (N, K), one scale for each row of weights."""
    product = _by_rows_of_weights(self, lambda part, dtype: part[0].astype(dtype).T, mat2.shape[0], mat2)
    return product * scales.astype(product.dtype)


@lowering("aten._convert_weight_to_int4pack.default")
def convert_weight_to_int4pack(self, innerKTiles):
    """(N, K / 2) bytes of two numbers each, the earlier one in the upper half, in the shape that PyTorch gives packed
    weights. What is where inside is a device's own matter: here row after row, so packing moves nothing."""
    rows, columns = self.shape
    words = lax.bitcast_convert_type(self.reshape(rows, columns // 4, 4), jnp.int32)
    return words.reshape(rows // 8, 2 * columns // (16 * innerKTiles), 32, innerKTiles // 2)


@lowering("aten._weight_int4pack_mm.default")
def weight_int4pack_mm(self, mat2, qGroupSize, qScaleAndZeros):
    """self (M, K) times packed numbers q of 0 to 15, weight = (q - 8) * scale + zero, with scale and zero
    (K / group, N, 2) for each group of columns."""
    rows, columns = 8 * mat2.shape[0], self.shape[1]
    packed = lax.bitcast_convert_type(mat2.reshape(rows, columns // 8), jnp.uint8).reshape(rows, columns // 2)

    def widen(part, dtype):
        values, scales = part
        q = jnp.stack([values >> 4, values & 15], -1).astype(jnp.int8) - 8
        q = q.reshape(len(values), columns // qGroupSize, qGroupSize).astype(dtype)
        weight = q * scales[..., :1].astype(dtype) + scales[..., 1:].astype(dtype)
        return weight.reshape(len(values), columns).T

    product = _by_rows_of_weights(self, widen, rows, packed, qScaleAndZeros.transpose(1, 0, 2))
    return product.astype(self.dtype)


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
