"""CTC loss: the host knows the lengths, so targets become a padded matrix before they reach the device's program."""

from __future__ import annotations

from typing import Any

import torch

from ..tensor import buffer
from .kernels import kernel

Tensor = torch.Tensor

_tpu = torch.library.Library("tpu", "FRAGMENT")
_tpu.define("ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank) "
            "-> (Tensor, Tensor)")
_tpu.define("ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
            "Tensor target_lengths, Tensor neg_log_likelihood, int blank, bool zero_infinity) -> Tensor")


def _meta(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor,
          blank: int) -> tuple[Tensor, Tensor]:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, 2 * targets.shape[1] + 1))


def _meta_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


_tpu.impl("ctc_loss", _meta, "Meta")
_tpu.impl("ctc_loss_backward", _meta_backward, "Meta")


def _numbers(lengths: Any) -> list[int]:
    return [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]


def _prepare(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any,
             blank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets (N, S) and both lengths, on the device; or PyTorch's complaint."""
    inputs, sizes = _numbers(input_lengths), _numbers(target_lengths)
    steps, batch, classes = log_probs.shape
    if not 0 <= blank < classes:
        raise RuntimeError("blank must be in label range")
    if len(inputs) != batch or len(sizes) != batch:
        raise RuntimeError(f"input_lengths and target_lengths must be of size batch_size ({batch})")
    for i, n in enumerate(inputs):
        if not 0 <= n <= steps:
            raise RuntimeError(f"Expected input_lengths to have value at most {steps}, but got value {n} "
                               f"(while checking arguments for ctc_loss, element {i})")
    if any(n < 0 for n in sizes):
        raise RuntimeError("Expected target_lengths to be non-negative")
    width = max(sizes, default=0)
    if targets.dim() == 1:
        starts, at = [], 0
        for n in sizes:
            starts.append(at)
            at += n
        if targets.shape[0] != at:
            raise RuntimeError(f"Expected tensor to have size {at} at dimension 0, but got size {targets.shape[0]} "
                               "for argument #2 'targets' (while checking arguments for ctc_loss)")
        index = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
        index = index.clamp(max=max(at - 1, 0)).to(log_probs.device)
        matrix = targets.to(log_probs.device)[index] if at else targets.new_zeros((batch, width))
    else:
        if targets.shape[1] < width:
            raise RuntimeError(f"Expected tensor to have size at least {width} at dimension 1, but got size "
                               f"{targets.shape[1]} for argument #2 'targets' (while checking arguments for ctc_loss)")
        matrix = targets[:, :width]
    if buffer.of(matrix) is None:
        matrix = matrix.to(log_probs.device)
    return (matrix.long(), torch.tensor(inputs, device=log_probs.device),
            torch.tensor(sizes, device=log_probs.device))


@kernel("aten._ctc_loss.default", "aten._ctc_loss.Tensor")
def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
             zero_infinity: bool = False) -> tuple[Tensor, Tensor]:
    prepared = _prepare(log_probs, targets, input_lengths, target_lengths, blank)
    return torch.ops.tpu.ctc_loss(log_probs, *prepared, blank)


@kernel("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor")
def ctc_loss_backward(grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any,
                      neg_log_likelihood: Tensor, log_alpha: Tensor, blank: int,
                      zero_infinity: bool = False) -> Tensor:
    prepared = _prepare(log_probs, targets, input_lengths, target_lengths, blank)
    return torch.ops.tpu.ctc_loss_backward(grad, log_probs, *prepared, neg_log_likelihood, blank, zero_infinity)
