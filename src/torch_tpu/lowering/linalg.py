"""Factorisations, solves, determinants. Where PyTorch's gradient formulas reuse a factor, its layout is LAPACK's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax

from . import context
from .matmul import matmul
from .promotion import promote, wide
from .table import lowering


def adjoint(x):
    return jnp.conj(x.mT)


def _broadcast(a, b):
    """Two stacks of matrices over their common batch dimensions."""
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, (*lead, *a.shape[-2:])), jnp.broadcast_to(b, (*lead, *b.shape[-2:]))


def _first_bad_minor(a):
    """Order of the first leading minor that is not positive, by plain elimination; 0 when there is none."""
    n = a.shape[-1]

    def step(k, state):
        rest, info = state
        pivot = rest[..., k, k].real
        info = jnp.where((info == 0) & ~(pivot > 0), k + 1, info)
        column = rest[..., :, k] / jnp.where(pivot > 0, pivot, 1)[..., None]
        return rest - column[..., :, None] * rest[..., k, None, :], info

    return lax.fori_loop(0, n, step, (a, jnp.zeros(a.shape[:-2], jnp.int32)))[1]


@lowering("aten.linalg_cholesky_ex.default")
def cholesky_ex(self, *, upper=False, check_errors=False):
    if 0 in self.shape:
        return self, jnp.zeros(self.shape[:-2], jnp.int32)
    lower = adjoint(self) if upper else self
    lower = jnp.tril(lower)
    factor = lax.linalg.cholesky(lower, symmetrize_input=False)
    failed = jnp.any(jnp.isnan(factor), axis=(-2, -1))
    whole = lower + adjoint(jnp.tril(lower, -1))
    info = lax.cond(jnp.any(failed), _first_bad_minor, lambda a: jnp.zeros(a.shape[:-2], jnp.int32), whole)
    return adjoint(factor) if upper else factor, jnp.where(failed, info, 0)


@lowering("aten.cholesky.default")
def cholesky(self, upper=False):
    return cholesky_ex(self, upper=upper)[0]


def _triangular(a, b, lower, left=True, transpose=False, conjugate=False, unit=False):
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=lower, transpose_a=transpose, conjugate_a=conjugate,
                                       unit_diagonal=unit)


@lowering("aten.cholesky_solve.default")
def cholesky_solve(self, input2, upper=False):
    factor, b = _broadcast(input2, self)
    first = _triangular(factor, b, not upper, transpose=upper, conjugate=upper)
    return _triangular(factor, first, not upper, transpose=not upper, conjugate=not upper)


@lowering("aten.cholesky_inverse.default")
def cholesky_inverse(self, upper=False):
    return cholesky_solve(jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape), self, upper)


@lowering("aten.linalg_qr.default")
def qr(A, mode="reduced"):
    if mode == "r":
        return jnp.zeros((0,), A.dtype), jnp.linalg.qr(A, mode="r")
    return tuple(jnp.linalg.qr(A, mode=mode))


@lowering("aten.geqrf.default")
def geqrf(self):
    reflectors, tau = jnp.linalg.qr(self, mode="raw")
    return reflectors.mT, tau


@lowering("aten._linalg_svd.default")
def svd(A, full_matrices=False, compute_uv=True, *, driver=None):
    if not compute_uv:
        nothing = jnp.zeros((0,), A.dtype)
        return nothing, jnp.linalg.svd(A, compute_uv=False), nothing
    return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))


@lowering("aten._linalg_eigh.default")
def eigh(A, UPLO="L", compute_v=True):
    if not compute_v:
        return jnp.linalg.eigvalsh(A, UPLO=UPLO.upper(), symmetrize_input=False), jnp.zeros((0,), A.dtype)
    return tuple(jnp.linalg.eigh(A, UPLO=UPLO.upper(), symmetrize_input=False))


def lu(a):
    """LAPACK's packed factors, 1-based pivots, and the first zero on U's diagonal (0 for none)."""
    if 0 in a.shape:
        return a, jnp.zeros((*a.shape[:-2], min(a.shape[-2:])), jnp.int32), jnp.zeros(a.shape[:-2], jnp.int32)
    factors, pivots, _ = lax.linalg.lu(a)
    zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    info = jnp.where(jnp.any(zero, -1), jnp.argmax(zero, -1) + 1, 0)
    return factors, (pivots + 1).astype(jnp.int32), info.astype(jnp.int32)


def _pivoted(pivot):
    if not pivot:
        raise NotImplementedError("LU factorisation without pivoting (pivot=False)")


@lowering("aten.linalg_lu_factor_ex.default")
def lu_factor_ex(A, *, pivot=True, check_errors=False):
    _pivoted(pivot)
    return lu(A)


def _permutation(pivots, size):
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, size)


@lowering("aten.lu_unpack.default")
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    m, n = LU_data.shape[-2:]
    k = min(m, n)
    nothing = jnp.zeros((0,), LU_data.dtype)
    p, low, up = nothing, nothing, nothing
    if unpack_pivots:
        p = jnp.swapaxes(jax.nn.one_hot(_permutation(LU_pivots, m), m, dtype=LU_data.dtype), -1, -2)
    if unpack_data:
        low = jnp.tril(LU_data[..., :, :k], -1) + jnp.eye(m, k, dtype=LU_data.dtype)
        up = jnp.triu(LU_data[..., :k, :])
    return p, low, up


@lowering("aten.linalg_lu.default")
def lu_whole(A, *, pivot=True):
    _pivoted(pivot)
    factors, pivots, _ = lu(A)
    return lu_unpack(factors, pivots)


@lowering("aten.linalg_lu_solve.default")
def lu_solve(LU, pivots, B, *, left=True, adjoint=False):
    n = LU.shape[-1]
    lead = jnp.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
    LU, B = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (LU, B))
    if 0 in B.shape:
        return B
    if not left:  # X A = B is A^H X^H = B^H
        return jnp.conj(lu_solve(LU, pivots, jnp.conj(B.mT), adjoint=not adjoint).mT)
    order = jnp.broadcast_to(_permutation(pivots, n), (*lead, n))[..., None]
    if not adjoint:
        B = jnp.take_along_axis(B, order, axis=-2)
        return _triangular(LU, _triangular(LU, B, True, unit=True), False)
    B = _triangular(LU, B, False, transpose=True, conjugate=True)
    B = _triangular(LU, B, True, transpose=True, conjugate=True, unit=True)
    return jnp.take_along_axis(B, jnp.argsort(order, axis=-2), axis=-2)


@lowering("aten._linalg_solve_ex.default")
def solve_ex(A, B, *, left=True, check_errors=False):
    vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    factors, pivots, info = lu(A)
    result = lu_solve(factors, pivots, B[..., None] if vector else B, left=left)
    return result[..., 0] if vector else result, factors, pivots, info


@lowering("aten.linalg_inv_ex.default")
def inv_ex(A, *, check_errors=False):
    factors, pivots, info = lu(A)
    return lu_solve(factors, pivots, jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)), info


@lowering("aten.linalg_solve_triangular.default")
def solve_triangular(self, B, *, upper, left=True, unitriangular=False):
    a, b = _broadcast(self, B)
    return _triangular(a, b, not upper, left=left, unit=unitriangular)


@lowering("aten.triangular_solve.default")
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
    a, b = _broadcast(A, self)
    return _triangular(a, b, not upper, transpose=transpose, unit=unitriangular), a


@lowering("aten.linalg_matrix_exp.default")
def matrix_exp(self):
    if 0 in self.shape:
        return self
    flat = wide(self).reshape(-1, *self.shape[-2:])
    return jax.vmap(lambda a: jsp.linalg.expm(a, max_squarings=64))(flat).reshape(self.shape).astype(self.dtype)


@lowering("aten.linalg_householder_product.default")
def householder_product(input, tau):
    return lax.linalg.householder_product(input, tau)


@lowering("aten.ormqr.default")
def ormqr(self, input2, input3, left=True, transpose=False):
    rows = self.shape[-2]
    full = jnp.pad(self, [(0, 0)] * (self.ndim - 1) + [(0, max(0, rows - self.shape[-1]))])[..., :rows]
    tau = jnp.pad(input2, [(0, 0)] * (input2.ndim - 1) + [(0, rows - input2.shape[-1])])
    q = lax.linalg.householder_product(full, tau)
    q = adjoint(q) if transpose else q
    return jnp.matmul(q, input3, precision=context.precision()) if left else \
        jnp.matmul(input3, q, precision=context.precision())


@lowering("aten.linalg_cross.default")
def cross(self, other, *, dim=-1):
    a, b = promote(self, other)
    a, b = jnp.broadcast_arrays(a, b)
    return jnp.cross(a, b, axis=dim)


@lowering("aten.linalg_pinv.atol_rtol_tensor")
def pinv(self, *, atol=None, rtol=None, hermitian=False):
    real = self.real.dtype
    if 0 in self.shape:
        return self.mT
    if atol is None:
        atol = jnp.zeros((), real)
    if rtol is None:
        rtol = jnp.where(jnp.asarray(atol) > 0, 0.0, jnp.finfo(real).eps * max(self.shape[-2:]))
    if hermitian:
        values, vectors = jnp.linalg.eigh(self, symmetrize_input=False)
        size = jnp.abs(values)
        keep = size > jnp.maximum(atol, rtol * size.max(-1))[..., None]
        inverse = jnp.where(keep, 1 / jnp.where(keep, values, 1), 0)
        return matmul(vectors * inverse[..., None, :].astype(self.dtype), adjoint(vectors))
    u, s, vh = jnp.linalg.svd(self, full_matrices=False)
    keep = s > jnp.maximum(atol, rtol * s.max(-1))[..., None]
    inverse = jnp.where(keep, 1 / jnp.where(keep, s, 1), 0)
    return matmul(adjoint(vh) * inverse[..., None, :].astype(self.dtype), adjoint(u))
