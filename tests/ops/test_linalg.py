"""Linear algebra against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import linalg

from conftest import compare, compare_grad

r = torch.randn
A = (3, 4, 4)


def definite(a):
    return a @ a.mT + 4 * torch.eye(a.shape[-1], device=a.device)


DIFFERENTIABLE = {
    "cholesky": (lambda a: linalg.cholesky(definite(a)), (A,)),
    "upper cholesky": (lambda a: linalg.cholesky(definite(a), upper=True), (A,)),
    "cholesky_solve": (lambda b, a: torch.cholesky_solve(b, linalg.cholesky(definite(a))), ((3, 4, 2), A)),
    "solve": (linalg.solve, (A, (3, 4, 2))),
    "solve from the right": (lambda a, b: linalg.solve(a, b, left=False), (A, (3, 2, 4))),
    "solve transposed": (lambda a, b: linalg.solve(a.mT, b), (A, (3, 4, 2))),
    "solve a vector": (linalg.solve, ((4, 4), (4,))),
    "inverse": (linalg.inv, (A,)),
    "determinant": (linalg.det, (A,)),
    "determinant of a view": (lambda a: linalg.det(a.mT), (A,)),
    "log determinant": (lambda a: linalg.slogdet(a)[1], (A,)),
    "triangular": (lambda a, b: linalg.solve_triangular(definite(a).tril(), b, upper=False), (A, (3, 4, 2))),
    "singular values": (linalg.svdvals, ((5, 3),)),
    "eigenvalues": (lambda a: linalg.eigvalsh(definite(a)), (A,)),
    "exponential": (lambda a: linalg.matrix_exp(a * 0.3), (A,)),
    "pseudo-inverse": (linalg.pinv, ((5, 3),)),
    "cross": (linalg.cross, ((4, 3), (4, 3))),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_results_and_gradients(name, no_fallback):
    fn, shapes = DIFFERENTIABLE[name]
    torch.manual_seed(1)
    args = [r(s, dtype=torch.float64) for s in shapes]
    compare(fn, *args)
    compare_grad(fn, *args, rtol=1e-6, atol=1e-6)


def test_factors(no_fallback):
    a = r(3, 5, 4)
    compare(lambda x: linalg.qr(x, "complete"), a, rtol=1e-4, atol=1e-5)
    compare(linalg.lu, a, rtol=1e-4, atol=1e-5)
    compare(linalg.lu_factor, r(A), rtol=1e-4, atol=1e-5)
    u, s, vh = linalg.svd(a.to("tpu"), full_matrices=False)
    torch.testing.assert_close((u @ torch.diag_embed(s) @ vh).cpu(), a, rtol=1e-4, atol=1e-5)


def test_cholesky_names_the_first_bad_minor(no_fallback):
    bad = torch.diag(torch.tensor([1.0, 2.0, -1.0, 3.0])).to("tpu")
    assert linalg.cholesky_ex(bad).info.item() == 3
    with pytest.raises(linalg.LinAlgError, match="order 3"):
        linalg.cholesky(bad)


def test_singular_matrix_is_an_error(no_fallback):
    with pytest.raises(linalg.LinAlgError, match="singular"):
        linalg.inv(torch.zeros(2, 2, device="tpu"))
