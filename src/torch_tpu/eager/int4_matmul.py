"""`tpu::int4_mm`: a product with weights of four bits. PyTorch has an operator for each vendor's way to pack them; ours
packs so that a TPU widens them without moving anything between lanes."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_tpu = torch.library.Library("tpu", "FRAGMENT")
_tpu.define("int4_mm(Tensor self, Tensor weight, Tensor scale) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"int4_mm: {message}")


def _meta(self: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """self (M, K) of a floating dtype, weight int8 (K / 2, N), scale (groups, N)."""
    _check(self.dim() == weight.dim() == scale.dim() == 2, "expected three matrices")
    _check(self.is_floating_point() and weight.dtype == torch.int8,
           f"expected a floating matrix and int8, got {self.dtype} and {weight.dtype}")
    _check(self.shape[1] == 2 * weight.shape[0] and scale.shape[1] == weight.shape[1]
           and weight.shape[0] % scale.shape[0] == 0,
           f"self {tuple(self.shape)}, weight {tuple(weight.shape)} of two numbers a byte, and scale "
           f"{tuple(scale.shape)} do not fit")
    return self.new_empty(self.shape[0], weight.shape[1])


def floats(weight: Tensor, scale: Tensor) -> Tensor:
    """The matrix (K, N) that packed numbers and scales stand for, in the scale's dtype."""
    rows, columns = weight.shape
    q = torch.stack([weight >> 4, (weight << 4) >> 4], 1).to(scale.dtype)
    return (q.reshape(scale.shape[0], -1, columns) * scale[:, None]).reshape(2 * rows, columns)


def _plain(self: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    _meta(self, weight, scale)
    return self @ floats(weight, scale).to(self.dtype)


_tpu.impl("int4_mm", _meta, "Meta")
_tpu.impl("int4_mm", _plain, "CPU")
