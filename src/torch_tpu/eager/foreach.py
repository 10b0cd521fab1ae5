"""Scalars of foreach operators that come as one CPU tensor: torch reads them on the host, as a list of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .kernels import kernel

aten = torch.ops.aten


def _as_list(packet: Any) -> Callable[..., Any]:
    def run(self: Sequence[torch.Tensor], tensor1: Sequence[torch.Tensor], tensor2: Sequence[torch.Tensor],
            scalars: torch.Tensor) -> Any:
        if scalars.device.type != "cpu":
            raise RuntimeError(f"Expected scalars to be on CPU, got {scalars.device} instead.")
        if scalars.shape != (len(self),):
            raise RuntimeError(f"Expected length of scalars to match input of length {len(self)} but got "
                               f"{scalars.numel()} instead.")
        return packet.ScalarList(self, tensor1, tensor2, scalars.tolist())

    return run


for _name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_"):
    kernel(f"aten._foreach_{_name}.Tensor")(_as_list(getattr(aten, f"_foreach_{_name}")))
