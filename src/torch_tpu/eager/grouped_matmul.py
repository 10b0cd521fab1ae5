"""torch.nn.functional.grouped_mm for every floating dtype: PyTorch's own shape rules know only bfloat16, so it becomes
`tpu::grouped_mm`, in eager mode and in traced graphs."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

_tpu = torch.library.Library("tpu", "FRAGMENT")
_aten = torch.library.Library("aten", "IMPL")

_tpu.define("grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) "
            "-> Tensor")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"grouped_mm: {message}")


def _meta(self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
          out_dtype: torch.dtype | None = None) -> Tensor:
    _check(self.dtype == mat2.dtype and self.is_floating_point(),
           f"both matrices must have one floating dtype, got {self.dtype} and {mat2.dtype}")
    _check(self.dim() in (2, 3) and mat2.dim() in (2, 3),
           f"Multiplicands must be 2D or 3D but got mat_a.dim()={self.dim()} and mat_b.dim()={mat2.dim()}")
    _check(self.shape[-1] == mat2.shape[-2], "contraction dimension of mat_a and mat_b must match")
    if self.dim() == 3 and mat2.dim() == 3:
        _check(offs is None, "Offsets tensor provided, but is not needed for 3D/3D multiplicand layouts.")
        _check(self.shape[0] == mat2.shape[0], "batched dimension has to match")
        shape = [self.shape[0], self.shape[1], mat2.shape[2]]
    else:
        if offs is None:
            raise RuntimeError(f"Offsets tensor not provided, but is needed for {self.dim()}D/{mat2.dim()}D "
                               "multiplicand layouts.")
        _check(offs.dim() == 1, f"Offsets tensor must be 1D, but got offs.dim()={offs.dim()}.")
        _check(offs.dtype == torch.int32, f"Offsets tensor must be integer (int32) tensor, but got {offs.dtype}.")
        groups = offs.shape[0]
        for matrix in (self, mat2):
            _check(matrix.dim() == 2 or matrix.shape[0] == groups, "matrix batch sizes have to match")
        shape = [self.shape[-2], mat2.shape[-1]]
        if self.dim() == 2 and mat2.dim() == 2:
            shape = [groups, *shape]
    return self.new_empty(shape, dtype=out_dtype or self.dtype)


_tpu.impl("grouped_mm", _meta, "Meta")


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    self, mat2, offs, bias, _ = inputs
    ctx.save_for_backward(self, mat2, offs)
    ctx.bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> Any:
    self, mat2, offs = ctx.saved_tensors
    if ctx.bias and ctx.needs_input_grad[3]:
        raise NotImplementedError("grouped_mm: the gradient of bias is not defined by PyTorch either")
    grad = grad.to(self.dtype)
    left = torch.ops.tpu.grouped_mm(grad, mat2.transpose(-2, -1), offs) if ctx.needs_input_grad[0] else None
    right = torch.ops.tpu.grouped_mm(self.transpose(-2, -1), grad, offs) if ctx.needs_input_grad[1] else None
    return left, right, None, None, None


torch.library.register_autograd("tpu::grouped_mm", _backward, setup_context=_save, lib=_tpu)


def grouped_mm(self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
               out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.ops.tpu.grouped_mm(self, mat2, offs, bias, out_dtype)


_aten.impl("_grouped_mm", grouped_mm, "AutogradPrivateUse1")
_aten.impl("_grouped_mm", grouped_mm, "PrivateUse1")
