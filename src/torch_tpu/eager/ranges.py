"""arange: its numbers decide its size, so a program would serve one call only. Made on the host, and copied."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import transfer
from ..tensor import buffer
from . import bookkeeping, creation
from .kernels import kernel

aten = torch.ops.aten


@kernel("aten.arange.default")
def arange(end: Any, **options: Any) -> torch.Tensor:
    return arange_step(0, end, 1, **options)


@kernel("aten.arange.start")
def arange_start(start: Any, end: Any, **options: Any) -> torch.Tensor:
    return arange_step(start, end, 1, **options)


@kernel("aten.arange.start_step")
def arange_step(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None,
                device: torch.device | None = None, **_: Any) -> torch.Tensor:
    creation.check_index(device)
    values = aten.arange.start_step(start, end, step, dtype=dtype, device="cpu")
    return bookkeeping.make(values) if bookkeeping.small(values) else buffer.wrap(transfer.to_device(values))
