"""Which writes PyTorch refuses because memory overlaps. Ours would come out right, but a program must not behave
differently here and on the CPU (ATen's MemoryOverlap.h and the checks of its kernels, torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch

from ..tensor import buffer
from .plan import OpOverload, Plan

Tensor = torch.Tensor

# Kernels that write to an expanded tensor without complaint.
_EXPANDED = frozenset({"fill", "zero", "masked_fill", "index_fill", "index_put", "_index_put_impl"})
# Kernels that refuse an input that is the written tensor itself, not only one that shares some of its memory.
_SEPARATE = frozenset({"gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_copy", "index_add",
                       "index_reduce", "index_put", "_index_put_impl", "take", "put", "cat"})
_PARTLY = frozenset({"copy", "masked_fill", "masked_scatter", "where"})


def _stem(op: OpOverload) -> str:
    return str(op).split(".")[1].removesuffix("_")


def check(plan: Plan, given: dict[str, Any], targets: list[Tensor]) -> None:
    """Raises what PyTorch raises for overlapping memory among the arguments of an in-place or out= operator."""
    stem = _stem(plan.op)
    for target in targets:
        if stem not in _EXPANDED and expanded(target):
            raise inner()
    separate = stem in _SEPARATE
    if not separate and stem not in _PARTLY and torch.Tag.pointwise not in plan.op.tags:
        return
    for name, kind in plan.params:
        value = given.get(name)
        inputs = value if kind == "tensors" and value is not None else (value,)
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                continue
            for target in targets:
                if tensor is target and (not separate or (name == "self" and not plan.out)):
                    continue
                status = shared(target, tensor)
                if status == "part" or (separate and status == "all"):
                    raise RuntimeError(
                        "unsupported operation: some elements of the input tensor and the written-to tensor refer to "
                        "a single memory location. Please clone() the tensor before performing the operation.")


def expanded(tensor: Tensor) -> bool:
    """Two positions are surely the same memory."""
    return tensor.numel() != 0 and any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride()))


def inner() -> RuntimeError:
    return RuntimeError("unsupported operation: more than one element of the written-to tensor refers to a single "
                        "memory location. Please clone() the tensor before performing the operation.")


def shared(a: Tensor, b: Tensor) -> str:
    """What two tensors share: "none", "part", "all", or "unknown" where a layout has gaps."""
    if a is b:
        return "all"
    if not a.numel() or not b.numel() or buffer.of(a) is not buffer.of(b) or buffer.of(a) is None:
        return "none"
    if buffer.dense_order(a.shape, a.stride()) is None or buffer.dense_order(b.shape, b.stride()) is None:
        return "unknown"
    begin, start = a.storage_offset() * a.element_size(), b.storage_offset() * b.element_size()
    end, stop = begin + a.numel() * a.element_size(), start + b.numel() * b.element_size()
    if (begin, end) == (start, stop):
        return "all" if a.stride() == b.stride() else "part"
    return "part" if begin < stop and start < end else "none"
