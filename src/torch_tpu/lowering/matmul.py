"""Matrix products. Narrow floats accumulate in float32 and round once; integers are exact."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import context, promotion
from .table import lowering


def accumulator(dtype):
    """The type a product of this type is accumulated and handed on in."""
    return np.dtype(np.float32) if np.dtype(dtype).name in ("bfloat16", "float16") else np.dtype(dtype)


def dot(a, b, contract, batch=((), ()), out=None):
    """lax.dot_general under PyTorch's numeric settings; narrow floats come back as float32."""
    if a.dtype == np.bool_:
        a, b = a.astype(jnp.int32), b.astype(jnp.int32)
    precision = context.precision() if a.dtype == jnp.float32 else None
    out = accumulator(a.dtype) if out is None else out
    if out != a.dtype and a.ndim == b.ndim == 2 and tuple(map(tuple, contract)) == ((1,), (0,)):
        return _narrow_dot(a, b, out, precision)
    if out != a.dtype and any(a.shape[i] == 1 for i in batch[0]):
        return _without_single_batches(a, b, contract, batch, out, precision)
    return lax.dot_general(a, b, (contract, batch), precision=precision, preferred_element_type=out)


def at_least_rows(a):
    """A matrix, or a batch of them, with so many rows that the matrix unit multiplies it (context.matmul_rows)."""
    context.note_rows(a.shape[-2])
    missing = context.matmul_rows() - a.shape[-2]
    if missing <= 0 or a.shape[-2] == 0:
        return a
    return lax.optimization_barrier(jnp.pad(a, [*[(0, 0)] * (a.ndim - 2), (0, missing), (0, 0)]))


def _narrow_dot(a, b, out, precision):
    """a @ b of matrices of bfloat16 or float16, in the form that the compiler is good at."""
    rows = a.shape[0]
    a = at_least_rows(a)
    contract = ((1,), (0,))
    if a.shape[0] > 1:
        # XLA:CPU (jaxlib 0.10.2) multiplies narrow floats as they are only where both sides are contracted along their
        # last dimension (three times as fast), and a single row only where they are not (thirty times). A weight that
        # was transposed for the product is so transposed back; of any other, XLA folds the transposition into the dot.
        b, contract = b.T, ((1,), (1,))
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=out)[:rows]


def _without_single_batches(a, b, contract, batch, out, precision):
    """XLA:CPU (jaxlib 0.10.2) drops batch dimensions of size 1 after it has chosen who computes a bfloat16 product,
    and then finds nobody who can: "Unsupported element type for DotThunk"."""
    shape = [a.shape[i] for i in batch[0]]
    for x, dims, own in ((a, batch[0], contract[0]), (b, batch[1], contract[1])):
        shape += [n for i, n in enumerate(x.shape) if i not in dims and i not in own]
    kept = [(i, j) for i, j in zip(*batch) if a.shape[i] != 1]

    def drop(x, dims, keep, own):
        gone = [i for i in dims if i not in keep]
        move = {i: i - sum(g < i for g in gone) for i in range(x.ndim)}
        return lax.squeeze(x, gone), tuple(move[i] for i in own), tuple(move[i] for i in keep)

    a, contract_a, batch_a = drop(a, batch[0], [i for i, _ in kept], contract[0])
    b, contract_b, batch_b = drop(b, batch[1], [j for _, j in kept], contract[1])
    product = lax.dot_general(a, b, ((contract_a, contract_b), (batch_a, batch_b)), precision=precision,
                              preferred_element_type=out)
    return product.reshape(shape)


def matmul(a, b, out=None):
    """a @ b over equal leading (batch) dimensions."""
    lead = tuple(range(a.ndim - 2))
    return dot(a, b, ((a.ndim - 1,), (b.ndim - 2,)), (lead, lead), out)


def blend(self, product, beta, alpha):
    """beta * self + alpha * product, where a zero beta ignores even a NaN in self."""
    dtype = product.dtype
    if not (isinstance(alpha, int) and alpha == 1):
        product = product * promotion.cast(alpha, dtype)
    if isinstance(beta, int | float) and beta == 0:
        return product
    base = promotion.cast(self, dtype)
    if isinstance(beta, int) and beta == 1:
        return base + product
    beta = promotion.cast(beta, dtype)
    return jnp.where(beta == 0, jnp.zeros((), dtype), base * beta) + product


@lowering("aten.mm.default", "aten.bmm.default")
def mm(self, mat2):
    return matmul(self, mat2)


@lowering("aten.mm.dtype", "aten.bmm.dtype")
def mm_dtype(self, mat2, out_dtype):
    return matmul(self, mat2, out_dtype)


@lowering("aten.mv.default")
def mv(self, vec):
    return dot(self, vec, ((1,), (0,)))


@lowering("aten.dot.default")
def dot_(self, tensor):
    return dot(self, tensor, ((0,), (0,)))


@lowering("aten.vdot.default")
def vdot(self, other):
    return dot(jnp.conj(self), other, ((0,), (0,)))


@lowering("aten.addmm.default", "aten.baddbmm.default")
def addmm(self, mat1, mat2, *, beta=1, alpha=1):
    return blend(self, matmul(mat1, mat2), beta, alpha)


@lowering("aten.addmm.dtype", "aten.baddbmm.dtype")
def addmm_dtype(self, mat1, mat2, out_dtype, *, beta=1, alpha=1):
    return blend(self, matmul(mat1, mat2, out_dtype), beta, alpha)


@lowering("aten.addmv.default")
def addmv(self, mat, vec, *, beta=1, alpha=1):
    return blend(self, mv(mat, vec), beta, alpha)


@lowering("aten.addbmm.default")
def addbmm(self, batch1, batch2, *, beta=1, alpha=1):
    return blend(self, dot(batch1, batch2, ((0, 2), (0, 1))), beta, alpha)


@lowering("aten.addr.default")
def addr(self, vec1, vec2, *, beta=1, alpha=1):
    dtype = promotion.result_dtype(self, vec1, vec2)
    vec1, vec2 = promotion.cast(vec1, dtype), promotion.cast(vec2, dtype)
    if vec1.dtype == np.bool_:
        return (vec1[:, None] & vec2 & promotion.cast(alpha, dtype)) | (self & promotion.cast(beta, dtype))
    return blend(self, promotion.wide(vec1)[:, None] * promotion.wide(vec2), beta, alpha)


@lowering("aten._addmm_activation.default")
def addmm_activation(self, mat1, mat2, *, beta=1, alpha=1, use_gelu=False):
    from jax import nn

    result = addmm(self, mat1, mat2, beta=beta, alpha=alpha)
    return nn.gelu(result, approximate=True) if use_gelu else nn.relu(result)


@lowering("aten._int_mm.default")
def int_mm(self, mat2):
    return matmul(self, mat2, np.dtype(np.int32))
