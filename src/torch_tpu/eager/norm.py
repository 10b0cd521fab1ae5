"""Batch normalisation takes its running statistics as optional arguments that it writes; each form has its lowering."""

from __future__ import annotations

from typing import Any

import torch

from . import execute
from . import plan as plans
from .kernels import kernel

Tensor = torch.Tensor
aten = torch.ops.aten


def _run(op: Any, *args: Any) -> Any:
    made = plans.make(op)
    assert made is not None, op
    return execute.run(made, args, {})


@kernel("aten.native_batch_norm.default")
def native_batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
                      running_var: Tensor | None, training: bool, momentum: float, eps: float) -> Any:
    if training and running_mean is None:
        return _run(aten._native_batch_norm_legit.no_stats, input, weight, bias, training, momentum, eps)
    if training:
        return _run(aten.native_batch_norm.default, input, weight, bias, running_mean, running_var, training,
                    momentum, eps)
    if running_mean is None or running_var is None:
        raise RuntimeError("native_batch_norm: without training, running_mean and running_var must be given")
    return _run(aten._native_batch_norm_legit_no_training.default, input, weight, bias, running_mean, running_var,
                momentum, eps)


@kernel("aten._native_batch_norm_legit.default")
def native_batch_norm_legit(input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
                            running_var: Tensor, training: bool, momentum: float, eps: float) -> Any:
    return native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
