"""The one module that uses torch's private API to make and view device tensors. Tried on torch 2.13.0;
tests/test_doors.py opens every door.

A device tensor is a plain torch.Tensor whose storage has a unique, made-up address; nothing ever reads that address.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence

import torch

_aten = torch.ops.aten
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_EXT_DEVICE = 12  # kDLExtDev of DLPack; torch maps it to PrivateUse1
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# DLPack type codes (dlpack.h): int 0, uint 1, float 2, bfloat 4, complex 5, bool 6, float8 10..14
_CODES: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.uint8: (1, 8), torch.uint16: (1, 16), torch.uint32: (1, 32), torch.uint64: (1, 64),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
    torch.complex64: (5, 64), torch.complex128: (5, 128), torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8), torch.float8_e4m3fnuz: (11, 8), torch.float8_e5m2: (12, 8),
    torch.float8_e5m2fnuz: (13, 8), torch.float8_e8m0fnu: (14, 8),
}


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


# Addresses far above anything a process can map (user space ends at 2**47, or 2**56 with five-level tables). Storages
# of up to 2**k bytes, and more than half of it, are numbered from k * 2**57 in steps of 2**k, so none is met twice.
_addresses = {k: itertools.count(k << 57, 1 << k).__next__ for k in range(6, 57)}
_from_dlpack = torch._C._from_dlpack  # type: ignore[attr-defined]
_thread = threading.get_ident


class Template:
    """A layout of which tensors are made: a filled-in DLPack struct. torch reads it when a storage dies, so it lives
    for ever (about 400 bytes), and belongs to the thread that made it, which alone writes addresses into it."""

    __slots__ = ("address", "cell", "dtype", "owner", "pointer", "sizes", "strides", "struct")

    def __init__(self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> None:
        self.sizes, self.strides, self.dtype = sizes, strides, dtype
        code, bits = _CODES[dtype]
        rank = len(sizes)
        self.struct = struct = _DLManagedTensor()
        tensor = struct.dl_tensor
        tensor.device_type, tensor.device_id, tensor.ndim = _EXT_DEVICE, 0, rank
        tensor.code, tensor.bits, tensor.lanes = code, bits, 1
        tensor.shape = (ctypes.c_int64 * max(rank, 1))(*sizes)
        tensor.strides = (ctypes.c_int64 * max(rank, 1))(*strides)
        elements = 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) if 0 not in sizes else 0
        self.address = _addresses[max(6, (elements * bits // 8).bit_length())]
        self.cell = ctypes.c_void_p.from_buffer(struct, _DLManagedTensor.dl_tensor.offset + _DLTensor.data.offset)
        self.pointer = ctypes.addressof(struct)
        self.owner = _thread()

    def make(self) -> torch.Tensor:
        """A tensor on tpu:0 with a storage of its own and no data yet (1 microsecond)."""
        if _thread() != self.owner:
            return template(self.sizes, self.strides, self.dtype).make()
        self.cell.value = self.address()
        return _from_dlpack(_capsule(self.pointer, b"dltensor", None))


class _Templates(threading.local):
    def __init__(self) -> None:
        self.cache: dict[tuple[Sequence[int], Sequence[int], torch.dtype], Template] = {}


_templates = _Templates()
_keep: list[Template] = []


def template(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Template:
    """This thread's template of a layout."""
    key = (tuple(sizes), tuple(strides), dtype)
    found = _templates.cache.get(key)
    if found is None:
        found = _templates.cache[key] = Template(*key)
        _keep.append(found)
    return found


def new_tensor(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on tpu:0 with a storage of its own and no data yet."""
    return template(sizes, strides, dtype).make()


def moment() -> dict[int, int]:
    """Now, as addresses: what `made_since` compares with."""
    return {k: take() for k, take in _addresses.items()}


def made_since(then: dict[int, int], address: int) -> bool:
    """Whether a storage was made after a moment."""
    return address >= then[address >> 57]


def as_strided(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int],
               offset: int | None = None) -> torch.Tensor:
    """A true view: shares the storage, and autograd tracks its base."""
    return _aten.as_strided.default.redispatch(_META, tensor, size, stride, offset)


def redispatch_view(op: torch._ops.OpOverload, *args: object, **kwargs: object) -> torch.Tensor:
    """Runs a view operator's Meta kernel on a device tensor."""
    return op.redispatch(_META, *args, **kwargs)


def set_storage(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, size: Sequence[int],
                stride: Sequence[int]) -> torch.Tensor:
    """Rebinds a tensor to a storage that is large enough (the Meta kernel would resize it instead)."""
    return _aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, storage, offset, size, stride)
