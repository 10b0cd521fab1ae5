"""Operators whose result shape depends on values: count on the device, read the count, then run at that size.

Boolean masks as indices end here too. Each costs one synchronisation, as on every accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime import debug
from ..tensor import buffer
from . import bookkeeping, execute, plan
from .kernels import kernel

aten = torch.ops.aten


@kernel("aten.nonzero.default")
def nonzero(tensor: torch.Tensor) -> torch.Tensor:
    count = int(aten.count_nonzero.default(tensor.reshape(-1)).item()) if tensor.numel() else 0
    return aten.nonzero_static.default(tensor, size=count)


@kernel("aten.masked_select.default")
def masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_select: expected BoolTensor for mask, got {mask.dtype}")
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    positions = nonzero(mask.reshape(-1)).squeeze(1)
    return tensor.reshape(-1).index_select(0, positions)


def resolve_indices(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Index tensors as integers on the device: masks become positions, CPU indices are checked and moved."""
    resolved: list[torch.Tensor | None] = []
    for index in indices:
        if index is None:
            resolved.append(None)
            continue
        if index.dtype in (torch.bool, torch.uint8):
            at = len(resolved)
            if at + index.dim() > tensor.dim():
                raise IndexError(f"too many indices for tensor of dimension {tensor.dim()}")
            for d in range(index.dim()):
                if index.shape[d] != tensor.shape[at + d]:
                    raise IndexError(f"The shape of the mask {list(index.shape)} at index {d} does not match the shape "
                                     f"of the indexed tensor {list(tensor.shape)} at index {at + d}")
            found = index.nonzero()
            resolved += [part if buffer.of(part) is not None else part.to("tpu") for part in found.unbind(1)]
            continue
        if index.dtype not in (torch.int64, torch.int32):
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        if buffer.of(index) is None:
            at = len(resolved)
            if at < tensor.dim():
                check_bounds(index, tensor.shape[at], at)
            index = index.to("tpu")
        elif len(resolved) < tensor.dim():
            values = bookkeeping.known(index)
            if values is not None or debug.on():
                check_bounds(index.cpu() if values is None else values, tensor.shape[len(resolved)], len(resolved))
        resolved.append(index)
    shapes = [tuple(index.shape) for index in resolved if index is not None]
    if any(shape != shapes[0] for shape in shapes):
        try:
            torch.broadcast_shapes(*shapes)
        except RuntimeError:
            raise IndexError("shape mismatch: indexing tensors could not be broadcast together with shapes "
                             + ", ".join(str(list(shape)) for shape in shapes)) from None
    if len(resolved) > tensor.dim():
        raise IndexError(f"too many indices for tensor of dimension {tensor.dim()}")
    return resolved


def check_bounds(index: torch.Tensor, size: int, dim: int) -> None:
    """Raises IndexError, with torch's message, for a host index outside [-size, size)."""
    if index.numel() == 0:
        return
    low, high = (int(v) for v in index.aminmax())
    if low < -size or high >= size:
        raise IndexError(f"index {low if low < -size else high} is out of bounds for dimension {dim} with size {size}")


@kernel("aten.repeat_interleave.Tensor")
def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    if repeats.dim() != 1 or repeats.dtype not in (torch.int64, torch.int32):
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat" if repeats.dim() != 1 else
                           "repeats has to be Long or Int tensor")
    if output_size is None:
        low, total = torch.stack([repeats.min(), repeats.sum()]).tolist() if repeats.numel() else (0, 0)
        if low < 0:
            raise RuntimeError("repeats can not be negative")
        output_size = total
    return execute.run(_plan(aten.repeat_interleave.Tensor), (repeats,), {"output_size": output_size})


@kernel("aten.bincount.default")
def bincount(tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        raise NotImplementedError(f"bincount: not implemented for {tensor.dtype}; it counts integers")
    if tensor.dim() != 1 or tensor.dtype == torch.bool:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if weights is not None and weights.shape != tensor.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    kind = torch.int64 if weights is None else weights.dtype if weights.dtype == torch.float32 else torch.float64
    low, high = torch.stack(tensor.aminmax()).tolist() if tensor.numel() else (0, -1)
    if low < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    result = torch.zeros(max(high + 1, minlength), dtype=kind, device=tensor.device)
    values = torch.ones_like(tensor, dtype=kind) if weights is None else weights.to(kind)
    return result.index_add_(0, tensor.to(torch.int64), values)


@kernel("aten.equal.default")
def equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if buffer.of(tensor) is None or buffer.of(other) is None:
        raise execute.mixed_devices(tensor if buffer.of(tensor) is None else other, aten.equal.default)
    if tensor.dtype != other.dtype:
        raise RuntimeError(f"Expected object of data type {tensor.dtype} but got data type {other.dtype} for argument "
                           "'other' in call to equal")
    return tensor.shape == other.shape and (tensor.numel() == 0 or bool((tensor == other).all().item()))


def _plan(op: Any) -> plan.Plan:
    made = plan.make(op)
    assert made is not None, op
    return made


@kernel("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    if buffer.of(tensor) is None:
        # A CPU tensor indexed by device tensors: torch demands the indices on the CPU.
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    return execute.run(_plan(aten.index.Tensor), (tensor, resolve_indices(tensor, indices)), {})


@kernel("aten.index_put_.default", "aten._index_put_impl_.default")
def index_put_(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor,
               accumulate: bool = False, unsafe: bool = False) -> torch.Tensor:
    if buffer.of(tensor) is None:
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    if values.dtype != tensor.dtype:
        raise RuntimeError(f"Index put requires the source and destination dtypes match, got {tensor.dtype} for the "
                           f"destination and {values.dtype} for the source.")
    if buffer.of(values) is None:
        if values.dim():
            raise execute.mixed_devices(values, aten.index_put_.default)
        values = values.to("tpu")
    masks = [index for index in indices if index is not None]
    if len(masks) == 1 and masks[0].dtype == torch.bool and values.numel() == 1 and not accumulate \
            and buffer.of(masks[0]) is not None:
        at = next(i for i, index in enumerate(indices) if index is not None)
        mask = masks[0]
        if tuple(tensor.shape[at:at + mask.dim()]) == tuple(mask.shape):
            mask = mask.reshape(tuple(mask.shape) + (1,) * (tensor.dim() - at - mask.dim()))
            return aten.masked_fill_.Tensor(tensor, mask, values.reshape(()))
    execute.run(_plan(aten.index_put_.default), (tensor, resolve_indices(tensor, indices), values, accumulate), {})
    return tensor


@kernel("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor,
              accumulate: bool = False) -> torch.Tensor:
    return index_put_(tensor.clone(), indices, values, accumulate)


@kernel("aten.one_hot.default")
def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if tensor.dtype != torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if num_classes < -1 or (num_classes == 0 and tensor.numel()):
        raise RuntimeError("num_classes should be positive")
    if not tensor.numel():
        if num_classes <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return torch.empty((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    if num_classes == -1 or debug.on() or bookkeeping.known(tensor) is not None:
        low, high = torch.stack(tensor.aminmax()).tolist()
        if low < 0:
            raise RuntimeError("Class values must be non-negative.")
        if num_classes == -1:
            num_classes = high + 1
        elif high >= num_classes:
            raise RuntimeError("Class values must be smaller than num_classes.")
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


@kernel("aten._assert_async.default")
def assert_async(tensor: torch.Tensor) -> None:
    """Waits for the tensor: an assertion that nobody looks at would be none."""
    aten._assert_async.default(tensor.cpu())


@kernel("aten._assert_async.msg")
def assert_async_msg(tensor: torch.Tensor, message: str) -> None:
    aten._assert_async.msg(tensor.cpu(), message)
