"""From floating-point weights to small integers with scales, and back. Plain PyTorch, on whatever device they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..eager import int4_matmul


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) floats as int8 (N, K) of -127 to 127 and a scale (N,) for each row, of the weight's dtype.

    The scale is rounded to that dtype before the weights are divided by it, so its rounding adds no error.
    """
    scale = (weight.float().abs().amax(1) / 127).to(weight.dtype)
    divisor = torch.where(scale == 0, 1.0, scale.float())
    return (weight.float() / divisor[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def from_int8(weight: Tensor, scale: Tensor) -> Tensor:
    """The floats that `to_int8` stands for, in the scale's dtype."""
    return weight.to(scale.dtype) * scale[:, None]


def to_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """(N, K) floats as int8 (K / 2, N), two numbers of -8 to 7 a byte (the earlier one in the upper half), and a scale
    (K / group_size, N), of the weight's dtype, for each group of inputs: what `tpu::int4_mm` takes."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // group_size, group_size)
    scale = (groups.abs().amax(2) / 7).to(weight.dtype)
    divisor = torch.where(scale == 0, 1.0, scale.float())
    q = (groups / divisor[..., None]).round().clamp(-8, 7).to(torch.int8).reshape(rows, columns // 2, 2)
    return ((q[..., 0] << 4) | (q[..., 1] & 15)).t().contiguous(), scale.t().contiguous()


def from_int4(weight: Tensor, scale: Tensor) -> Tensor:
    """The floats (N, K) that `to_int4` stands for, in the scale's dtype."""
    return int4_matmul.floats(weight, scale).t()


def rows_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations (M, K) as int8 and a float32 scale (M, 1) for each row."""
    scale = (x.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale
