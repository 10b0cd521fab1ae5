"""Making, viewing, resizing and rebinding tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..runtime import dtypes
from ..tensor import buffer, torch_door
from .kernels import kernel

aten = torch.ops.aten


def check_index(device: torch.device | None) -> None:
    """One process drives one chip; any other index is an error, never another chip by stealth."""
    if device is not None and device.index not in (None, 0):
        from ..runtime import chips

        raise chips.other_chip(device.index)


def elsewhere(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A factory that a device tensor is only the pattern of (`torch.zeros_like(x, device="cpu")`)."""

    def pattern(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and buffer.of(value) is not None:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=kwargs["device"])
        return value

    return op(*(pattern(value) for value in args), **kwargs)


@kernel("aten.empty.memory_format")
def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, layout: Any = None,
          device: torch.device | None = None, pin_memory: bool | None = None,
          memory_format: torch.memory_format | None = None) -> torch.Tensor:
    check_index(device)
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"tpu tensors are strided; layout {layout} is not supported: use .to_dense()")
    if pin_memory:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    sizes = tuple(size)
    if any(n < 0 for n in sizes):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(sizes)}: {list(sizes)}")
    strides = buffer.contiguous(sizes)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = torch.empty(sizes, device="meta", memory_format=memory_format).stride()
    return buffer.empty(sizes, strides, dtype or torch.get_default_dtype())


@kernel("aten.empty_strided.default")
def empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None,
                  layout: Any = None, device: torch.device | None = None,
                  pin_memory: bool | None = None) -> torch.Tensor:
    check_index(device)
    if pin_memory:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    return buffer.empty(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


@kernel("aten.as_strided.default")
def as_strided(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int],
               offset: int | None = None) -> torch.Tensor:
    return torch_door.as_strided(tensor, size, stride, offset)


@kernel("aten.as_strided_copy.default")
def as_strided_copy(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int],
                    offset: int | None = None) -> torch.Tensor:
    """A window on the whole storage, which a lowering does not see."""
    return torch_door.as_strided(tensor, size, stride, offset).clone(memory_format=torch.contiguous_format)


@kernel("aten.as_strided_scatter.default")
def as_strided_scatter(tensor: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int],
                       offset: int | None = None) -> torch.Tensor:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch_door.as_strided(tensor, (elements,), (1,), 0).clone()
    where = int(tensor.storage_offset()) if offset is None else offset
    torch_door.as_strided(whole, size, stride, where).copy_(source)
    return torch_door.as_strided(whole, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@kernel("aten.view.default", "aten._unsafe_view.default")
def view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return torch_door.redispatch_view(aten.view.default, tensor, size)


@kernel("aten._reshape_alias.default")
def reshape_alias(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    return torch_door.redispatch_view(aten._reshape_alias.default, tensor, size, stride)


@kernel("aten.unfold.default")
def unfold(tensor: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    return torch_door.redispatch_view(aten.unfold.default, tensor, dim, size, step)


@kernel("aten.view_as_real.default")
def view_as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch_door.redispatch_view(aten.view_as_real.default, tensor)


@kernel("aten.view_as_complex.default")
def view_as_complex(tensor: torch.Tensor) -> torch.Tensor:
    return torch_door.redispatch_view(aten.view_as_complex.default, tensor)


@kernel("aten.view.dtype")
def view_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    dtypes.to_numpy(dtype)
    return torch_door.redispatch_view(aten.view.dtype, tensor, dtype)


@kernel("aten.resize_.default")
def resize_(tensor: torch.Tensor, size: Sequence[int], *,
            memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """Keeps the elements in memory order, as torch does; a larger storage is zero behind them."""
    sizes = tuple(size)
    if tuple(tensor.shape) == sizes:
        return tensor
    strides = buffer.contiguous(sizes)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = torch.empty(sizes, device="meta", memory_format=memory_format).stride()
    storage = tensor.untyped_storage()
    needed = (int(tensor.storage_offset()) + math.prod(sizes)) * tensor.element_size()
    if needed > storage.nbytes():
        storage = grow(tensor, needed)
    return torch_door.set_storage(tensor, storage, int(tensor.storage_offset()), sizes, strides)


@kernel("aten._resize_output_.default")
def resize_output_(tensor: torch.Tensor, size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Makes an out= tensor fit; warns, in torch's words, when it already held elements."""
    if tuple(tensor.shape) == tuple(size):
        return tensor
    if tensor.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(tensor.shape)}, which does not "
            f"match the required output shape {list(size)}. This behavior is deprecated, and in a future PyTorch "
            "release outputs will not be resized unless they have zero elements. You can explicitly reuse an out "
            "tensor t by resizing it, inplace, to zero elements with t.resize_(0).", UserWarning, stacklevel=2)
    return resize_(tensor, size)


def grow(tensor: torch.Tensor, nbytes: int) -> torch.UntypedStorage:
    """A storage of at least nbytes that begins with the bytes of the tensor's own."""
    count = -(-nbytes // tensor.element_size())
    larger = buffer.empty((count,), (1,), tensor.dtype)
    held = buffer.of(tensor)
    old = tensor.untyped_storage().nbytes() // tensor.element_size()
    if held is not None and held.written() and old:
        larger[:old].copy_(torch_door.as_strided(tensor.detach(), (old,), (1,), 0))
    return larger.untyped_storage()


@kernel("aten.set_.source_Storage_storage_offset")
def set_storage(tensor: torch.Tensor, storage: Any, offset: int, size: Sequence[int],
                stride: Sequence[int] = ()) -> torch.Tensor:
    sizes = tuple(size)
    strides = tuple(stride) if stride or not sizes else buffer.contiguous(sizes)
    return _lay(tensor, getattr(storage, "_untyped_storage", storage), offset, sizes, strides)


@kernel("aten.set_.source_Storage")
def set_whole_storage(tensor: torch.Tensor, storage: Any) -> torch.Tensor:
    storage = getattr(storage, "_untyped_storage", storage)
    count = storage.nbytes() // tensor.element_size()
    return _lay(tensor, storage, 0, (count,), (1,))


def _lay(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, sizes: Sequence[int],
         strides: Sequence[int]) -> torch.Tensor:
    """Binds a tensor to a storage, whose bytes may get their type by it."""
    held = getattr(storage, "_tpu_buffer", None)
    if held is not None:
        held.adopt(sizes, strides, dtypes.to_numpy(tensor.dtype))
    return torch_door.set_storage(tensor, storage, offset, sizes, strides)


@kernel("aten.set_.source_Tensor")
def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch_door.set_storage(tensor, source.untyped_storage(), int(source.storage_offset()), tuple(source.shape),
                                  source.stride())


@kernel("aten.set_.default")
def set_empty(tensor: torch.Tensor) -> torch.Tensor:
    fresh = buffer.empty((0,), (1,), tensor.dtype)
    return torch_door.set_storage(tensor, fresh.untyped_storage(), 0, (0,), (1,))


@kernel("aten.is_pinned.default")
def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return False


@kernel("aten.record_stream.default")
def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    return None


@kernel("aten.is_set_to.default")
def is_set_to(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.untyped_storage() is other.untyped_storage() and tensor.shape == other.shape
            and tensor.stride() == other.stride() and tensor.storage_offset() == other.storage_offset())
