"""From floating-point weights to small integers with scales, and back. Plain PyTorch, on whatever device they are."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """(N, K) floats as bytes (N, K / 2), two numbers of -8 to 7 in each (plus 8, the earlier one in the upper half),
    and a scale (N, K / group_size), of the weight's dtype, for each group of columns.

    The bytes are int8, since code of models that looks at a weight's dtype (T5's) knows that one as no dtype to compute
    in.
    """
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // group_size, group_size)
    scale = (groups.abs().amax(2) / 7).to(weight.dtype)
    divisor = torch.where(scale == 0, 1.0, scale.float())
    q = ((groups / divisor[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8).reshape(rows, columns // 2, 2)
    return ((q[..., 0] << 4) | q[..., 1]).view(torch.int8), scale


def from_int4(weight: Tensor, scale: Tensor) -> Tensor:
    """The floats that `to_int4` stands for, in the scale's dtype."""
    rows, half = weight.shape
    weight = weight.view(torch.uint8)
    q = torch.stack([weight >> 4, weight & 15], -1).to(scale.dtype) - 8
    return (q.reshape(rows, scale.shape[1], -1) * scale[..., None]).reshape(rows, 2 * half)


def rows_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations (M, K) as int8 and a float32 scale (M, 1) for each row."""
    scale = (x.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale
