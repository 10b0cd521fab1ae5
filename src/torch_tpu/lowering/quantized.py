"""Products of quantised matrices: int8 and int4 weights, and float8 with scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from .grouped_matmul import grouped_mm
from .matmul import matmul
from .table import lowering


@lowering("aten._weight_int8pack_mm.default")
def weight_int8pack_mm(self, mat2, scales):
    """self (M, K) times int8 weights (N, K), one scale for each row of weights."""
    product = matmul(self, mat2.T.astype(self.dtype))
    return product * scales.astype(product.dtype)


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
