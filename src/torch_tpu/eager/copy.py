"""Copies: host to device, device to host, device to device, and scalars."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..lowering import strided
from ..runtime import dtypes, transfer
from ..tensor import buffer
from . import bookkeeping, execute, overlap, plan
from .kernels import kernel

aten = torch.ops.aten


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with a device tensor's values, contiguous; waits for them."""
    held = buffer.of(tensor)
    assert held is not None
    if held.mirror is not None:
        return bookkeeping.known(tensor).clone(memory_format=torch.contiguous_format)  # type: ignore[union-attr]
    if bookkeeping.small(tensor) and held.kind.nbytes <= bookkeeping.LIMIT and tensor.dtype == held.kind.torch_dtype:
        bookkeeping.pull(held)
        return to_host(tensor)
    whole = strided.of(tensor)
    if held.shape == whole.sizes and tensor.is_contiguous() and tensor.dtype == torch_dtype(held):
        return transfer.to_host(held.array())
    base = transfer.to_host(held.array()).view(-1)
    if base.dtype != tensor.dtype:
        base = base.view(tensor.dtype) if not base.is_complex() else torch.view_as_real(base).view(-1).view(
            tensor.dtype)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def torch_dtype(held: buffer.Buffer) -> torch.dtype:
    return dtypes.to_torch(held.dtype)


def _is_window(tensor: torch.Tensor) -> bool:
    held = buffer.of(tensor)
    return held is not None and tensor.untyped_storage().nbytes() > 4 * tensor.numel() * tensor.element_size()


@kernel("aten._copy_from.default")
def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(target, source, non_blocking)


@kernel("aten._copy_from_and_resize.default")
def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if source.shape != target.shape:
        target.resize_(source.shape)
    return copy_(target, source)


@kernel("aten.copy_.default")
def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """target[...] = source, with broadcasting and conversion, between any two of cpu and tpu."""
    if target.is_conj() or target.is_neg() or source.is_conj() or source.is_neg():
        return _copy_lazy(target, source)
    here, there = buffer.of(target), buffer.of(source)
    if here is None and there is None:
        raise execute.mixed_devices(target if target.device.type != "cpu" else source, aten.copy_.default)
    if here is None:
        if _is_window(source):
            source = aten.clone.default(source, memory_format=torch.contiguous_format)
        target.copy_(to_host(source))
        return target
    if there is None:
        if source.device.type != "cpu":
            raise execute.mixed_devices(source, aten.copy_.default)
        window = strided.of(target)
        if overlap.expanded(target):
            raise overlap.inner()
        value = source.to(target.dtype)
        if value.shape != target.shape:
            # on meta tensors first, for torch's own words about shapes that do not fit
            torch.empty(target.shape, device="meta").copy_(torch.empty(value.shape, device="meta"))
            value = value.expand(target.shape)
        if target.dtype == torch_dtype(here) and strided.is_whole(here.shape, window):
            order = buffer.dense_order(target.shape, target.stride())
            assert order is not None
            if bookkeeping.small(target):
                bookkeeping.keep(here, value.permute(order).clone(memory_format=torch.contiguous_format))
                return target
            here.rebind(transfer.to_device(value.permute(order).reshape(here.shape), here.sharding()))
            return target
        known = bookkeeping.known(target) if bookkeeping.small(target) else None
        if known is not None:
            known.copy_(value)
            here.changed()
            return target
        source = buffer.wrap(transfer.to_device(value))
    if target is source:
        return target
    execute.run(_copy_plan(), (target, source), {})
    return target


def _copy_lazy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Between tensors whose conjugation or negation is still a flag: flip the target's away, apply the source's after.
    (The second `conj()` of a flagged tensor is the plain memory.)"""
    if target.is_conj():
        copy_(target.conj(), source.conj())
    elif target.is_neg():
        copy_(torch._neg_view(target), torch._neg_view(source))
    elif source.is_conj():
        copy_(target, source.conj())
        target.conj_physical_()
    else:
        copy_(target, torch._neg_view(source))
        target.neg_()
    return target


@kernel("aten.clone.default")
def clone(tensor: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        form = torch.preserve_format if memory_format is None else memory_format
        return _copy_lazy(torch.empty_like(tensor, memory_format=form), tensor)
    given = {} if memory_format is None else {"memory_format": memory_format}
    return execute.run(_clone_plan(), (tensor,), given)


@functools.cache
def _clone_plan() -> plan.Plan:
    made = plan.make(aten.clone.default)
    assert made is not None
    return made


@functools.cache
def _copy_plan() -> plan.Plan:
    made = plan.make(aten.copy_.default)
    assert made is not None
    return made


@kernel("aten._local_scalar_dense.default")
def local_scalar(tensor: torch.Tensor) -> Any:
    if _is_window(tensor):
        tensor = aten.clone.default(tensor, memory_format=torch.contiguous_format)
    return to_host(tensor).item()


@kernel("aten._to_copy.default")
def to_copy(tensor: torch.Tensor, *, dtype: torch.dtype | None = None, layout: Any = None,
            device: torch.device | None = None, pin_memory: bool | None = None, non_blocking: bool = False,
            memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """A copy on another device or of another dtype."""
    from . import creation

    if layout not in (None, torch.strided):
        raise NotImplementedError(f"tpu tensors are strided; a conversion to layout {layout} is not supported")
    want = dtype or tensor.dtype
    if device is not None and device.type != "tpu":
        return _leave(tensor, want, device, memory_format)
    creation.check_index(device)
    form = torch.preserve_format if memory_format is None else memory_format
    held = buffer.of(tensor)
    if held is not None and held.mirror is not None and bookkeeping.small(tensor):
        return bookkeeping.make(bookkeeping.known(tensor).to(want, memory_format=form, copy=True))  # type: ignore
    result = torch.empty_like(tensor, dtype=want, device="tpu", memory_format=form)
    return copy_(result, tensor)


def _leave(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device,
           memory_format: torch.memory_format | None) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    form = torch.preserve_format if memory_format is None else memory_format
    meta = torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"),
                            memory_format=form)
    if _is_window(tensor):
        tensor = aten.clone.default(tensor, memory_format=torch.contiguous_format)
    host = to_host(tensor)
    if host.dtype == dtype and host.stride() == meta.stride() and device.type == "cpu":
        return host
    result = torch.empty_strided(meta.shape, meta.stride(), dtype=dtype, device=device)
    return result.copy_(host)
