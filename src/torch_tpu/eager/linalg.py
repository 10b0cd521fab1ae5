"""Determinants, and the errors that a factorisation reports.

PyTorch's gradient of a determinant reuses the factor of A, or of A's transpose where A is real and contiguous (what
LAPACK's column order made cheap), so which of the two it is must follow that rule.
"""

from __future__ import annotations

from typing import Any

import torch

from . import execute
from . import plan as plans
from .kernels import kernel

Tensor = torch.Tensor
aten = torch.ops.aten


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = plans.make(op)
    assert made is not None, op
    return execute.run(made, args, kwargs)


def _checked(op: Any, name: str) -> None:
    """PyTorch's error for a failed factorisation, when check_errors asks for it."""

    @kernel(str(op))
    def run(*args: Any, check_errors: bool = False, **kwargs: Any) -> Any:
        results = _run(op, args, kwargs)
        if check_errors:
            torch._linalg_check_errors(results[-1], name, is_matrix=args[0].dim() == 2)
        return results


_checked(aten.linalg_cholesky_ex.default, "linalg.cholesky_ex")
_checked(aten.linalg_inv_ex.default, "linalg.inv_ex")
_checked(aten.linalg_lu_factor_ex.default, "linalg.lu_factor_ex")
_checked(aten._linalg_solve_ex.default, "torch.linalg.solve_ex")


def _transposed(matrix: Tensor) -> bool:
    return matrix.is_contiguous() and not matrix.is_complex()


def _square(matrix: Tensor, name: str) -> None:
    if matrix.dim() < 2:
        raise RuntimeError(f"{name}: The input tensor A must have at least 2 dimensions.")
    if matrix.shape[-1] != matrix.shape[-2]:
        raise RuntimeError(f"{name}: A must be batches of square matrices, but they are {matrix.shape[-2]} by "
                           f"{matrix.shape[-1]} matrices")
    if not (matrix.is_floating_point() or matrix.is_complex()):
        raise RuntimeError(f"{name}: Expected a floating point or complex tensor as input. Got {matrix.dtype}")


def _diagonal_and_sign(A: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _square(A, name)
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(A.mT if _transposed(A) else A)
    swaps = (pivots != torch.arange(1, A.shape[-1] + 1, dtype=pivots.dtype, device=A.device)).sum(-1)
    sign = 1 - 2 * (swaps % 2)
    return factors.diagonal(dim1=-2, dim2=-1), sign.to(A.dtype), factors, pivots


@kernel("aten._linalg_det.default")
def det(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    diagonal, sign, factors, pivots = _diagonal_and_sign(A, "linalg.det")
    return diagonal.prod(-1) * sign, factors, pivots


@kernel("aten._linalg_slogdet.default")
def slogdet(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    diagonal, sign, factors, pivots = _diagonal_and_sign(A, "linalg.slogdet")
    return diagonal.sgn().prod(-1) * sign, diagonal.abs().log().sum(-1), factors, pivots


# Traced graphs take the same route: only while tracing is it known how A lies in memory.
DECOMPOSITIONS = {aten._linalg_det.default: det, aten._linalg_slogdet.default: slogdet}
