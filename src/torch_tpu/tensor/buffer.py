"""The data of a storage: one JAX array, hung on the storage's Python object, shared by all its views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..runtime import dtypes, memory, partition, transfer
from . import torch_door


class Kind:
    """Shape and dtype of an array: one object for each combination, so that keys compare it by identity."""

    __slots__ = ("dtype", "nbytes", "shape", "strides", "torch_dtype")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.strides = contiguous(shape)
        self.torch_dtype = dtypes.to_torch(dtype)


_kinds: dict[tuple[tuple[int, ...], np.dtype], Kind] = {}


def kind(shape: tuple[int, ...], dtype: np.dtype) -> Kind:
    found = _kinds.get((shape, dtype))
    if found is None:
        found = _kinds.setdefault((shape, dtype), Kind(shape, dtype))
    return found


class Pending:
    """An array that an operator recorded in a batch will give; `batch` is None once `array` is there."""

    __slots__ = ("__weakref__", "array", "batch", "wire")

    def __init__(self, batch: Any, wire: tuple[int, int]) -> None:
        self.array: Any = None
        self.batch = batch
        self.wire = wire  # which node and which of its outputs

    def get(self) -> Any:
        if self.batch is not None:
            self.batch.run()
        return self.array


class Buffer:
    """Device memory of one storage.

    `shape` is the shape in which the array was made (a tensor is a strided window on it, row-major). The array is made
    at its first use: `torch.empty` costs no memory until then, and the bytes of a file wait on the host until a tensor
    says what they are. `shared` says that somebody else holds the array too (`to_jax`, a copy that nobody has written
    yet), so it must not be donated.
    """

    # `mirror`: the same bytes on the host (flat, uint8), of integers that the host computes (eager/bookkeeping.py).
    __slots__ = ("_array", "_bytes", "_host", "_size", "kind", "mirror", "shared")

    def __init__(self, kind: Kind, array: Any = None) -> None:
        self.kind = kind
        self.shared = False
        self.mirror: torch.Tensor | None = None
        self._array = array
        self._host: torch.Tensor | None = None
        self._size: int | None = None
        self._bytes = 0
        nbytes = kind.nbytes
        if nbytes:
            if partition.current is not None:
                nbytes = partition.chip_bytes(array, nbytes)
            memory.reserve(nbytes)
            self._bytes = nbytes

    @classmethod
    def uncounted(cls, kind: Kind) -> Buffer:
        """One that is only described: no chip's memory is counted for it (programs for another machine)."""
        held = cls.__new__(cls)
        held.kind, held.shared, held.mirror = kind, False, None
        held._array = held._host = held._size = None
        held._bytes = 0
        return held

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kind.shape

    @property
    def dtype(self) -> np.dtype:
        return self.kind.dtype

    def array(self) -> Any:
        """The storage's data; runs the batch that makes it, if it waits in one."""
        if self._array.__class__ is Pending:
            self._array = self._array.get()
        elif self._array is None:
            if self._size == 0:
                raise RuntimeError("this tensor's storage was resized to 0 bytes (untyped_storage().resize_(0)); "
                                   "resize it back before using the tensor")
            if self.mirror is not None:
                self._array = transfer.to_device(self.mirror.view(self.kind.torch_dtype).view(self.shape))
            elif self._host is None:
                self._array = _zeros(self.shape, self.dtype)
            else:
                self._array = transfer.to_device(self._host.view(dtypes.to_torch(self.dtype)).view(self.shape))
                self._host = None
        return self._array

    def written(self) -> bool:
        return self._array is not None or self._host is not None or self.mirror is not None

    def keep(self, mirror: torch.Tensor) -> None:
        """Takes bytes (a flat uint8 CPU tensor of the buffer's own) as the storage's data; the device gets them when a
        program needs them."""
        self._array = self._host = None
        self.mirror = mirror
        self.shared = False

    def remember(self, mirror: torch.Tensor) -> None:
        """Keeps a copy of the device's data on the host, until the device writes them."""
        self.mirror = mirror

    def changed(self) -> None:
        """The mirror was written: what the device has is old."""
        self._array = None
        self.shared = False

    def postpone(self, what: Kind, waiting: Pending) -> None:
        """Takes the result of a recorded operator as the storage's data."""
        self._array = waiting
        self._host = self.mirror = None
        self.kind = what
        self.shared = False

    def rebind(self, array: Any) -> None:
        """Takes a new array as the storage's data (same number of bytes)."""
        self._array = array
        self._host = self.mirror = None
        if array.shape != self.kind.shape or array.dtype != self.kind.dtype:
            self.kind = kind(array.shape, array.dtype)
        self.shared = False
        if partition.current is not None:
            self._recount()

    def _recount(self) -> None:
        """On a mesh: the memory of one chip that the array takes, which depends on how it is spread."""
        now = partition.chip_bytes(self._array, self.kind.nbytes) if self._bytes else 0
        if now != self._bytes:
            memory.release(self._bytes)
            self._bytes = now
            memory.reserve(now)

    def replace(self, array: Any) -> None:
        """Takes a new array of the same shape and dtype."""
        self._array = array
        self._host = self.mirror = None
        self.shared = False

    def sharding(self) -> Any:
        """How the data is spread over the mesh, for what takes its place; None without a mesh, or without data."""
        mesh = partition.current
        found = getattr(self._array, "sharding", None)
        return found if mesh is not None and mesh.has(found) else None

    def spread(self, sharding: Any) -> None:
        """Spreads the data over the chips of the mesh; what is still on the host gets there in parts."""
        if self._array is None and self._size is None:
            host = self._host if self._host is not None else self.mirror
            typed = torch.zeros(self.shape, dtype=self.kind.torch_dtype) if host is None \
                else host.view(self.kind.torch_dtype).view(self.shape)
            self.rebind(transfer.to_device(typed, sharding))
        else:
            shared = self.shared
            self.rebind(partition.current.spread(self.array(), sharding))  # type: ignore[union-attr]
            self.shared = shared

    def share(self, other: Buffer) -> None:
        """Takes the other's data without a copy, until one of the two is written."""
        self.rebind(other.array())
        self.shared = other.shared = True

    def load(self, host: torch.Tensor) -> None:
        """Takes bytes (a uint8 CPU tensor that nobody changes any more) as the storage's data."""
        self._array = self.mirror = None
        self._host = host
        self.shared = False

    def adopt(self, sizes: Sequence[int], strides: Sequence[int], dtype: np.dtype) -> None:
        """Bytes without a type, as a file's are, become elements when a tensor is laid over them. Otherwise every
        operator would have to reinterpret them."""
        if self._array is not None or self.mirror is not None or self.dtype != np.uint8 or dtype == np.uint8:
            return
        nbytes = math.prod(self.shape)
        if nbytes % dtype.itemsize:
            return
        order = dense_order(sizes, strides)
        whole = order is not None and math.prod(sizes) * dtype.itemsize == nbytes
        shape = tuple(sizes[d] for d in order) if whole and order is not None else (nbytes // dtype.itemsize,)
        self.kind = kind(shape, dtype)
        if self._host is not None:
            self.array()

    def capacity(self) -> int:
        return self.kind.nbytes

    def nbytes(self) -> int:
        return self.capacity() if self._size is None else self._size

    def resize(self, nbytes: int) -> None:
        """Gives the memory back (0 bytes) or takes it again; the tensors' own sizes stay."""
        capacity = self.capacity()
        if nbytes > capacity:
            raise RuntimeError(
                f"a tpu storage of {capacity} bytes cannot be resized to {nbytes}: it can be emptied (resize_(0)) and "
                "grow back to its first size. Use tensor.resize_(), which takes a new storage where needed.")
        if nbytes == 0 and self._bytes:
            self._array = self._host = self.mirror = None
            memory.release(self._bytes)
            self._bytes = 0
            self.shared = False
        elif nbytes and not self._bytes:
            memory.reserve(capacity)
            self._bytes = capacity
        self._size = None if nbytes == capacity else nbytes

    def __del__(self) -> None:
        if self._bytes:
            memory.release(self._bytes)


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return transfer.to_device(torch.zeros(shape, dtype=dtypes.to_torch(dtype)))


def of(tensor: torch.Tensor) -> Buffer | None:
    """The buffer behind a tensor; None when it is not on the device."""
    return getattr(tensor.untyped_storage(), "_tpu_buffer", None)


def wrap(array: Any, sizes: Sequence[int] | None = None, strides: Sequence[int] | None = None) -> torch.Tensor:
    """A new tensor over an array. With sizes and strides, the array holds the elements in memory order."""
    what = kind(array.shape, array.dtype)
    if sizes is None or strides is None:
        sizes, strides = what.shape, what.strides
    return lay(torch_door.template(sizes, strides, what.torch_dtype), what, array)


def lay(template: torch_door.Template, what: Kind, array: Any) -> torch.Tensor:
    """A new tensor of a layout over an array of that kind."""
    tensor = template.make()
    tensor.untyped_storage()._tpu_buffer = Buffer(what, array)  # type: ignore[attr-defined]
    return tensor


def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, make: Any = Buffer) -> torch.Tensor:
    """A tensor whose memory is taken at its first use, and is zero then; or Buffer.uncounted: that is never used."""
    element = dtypes.to_numpy(dtype)
    order = dense_order(sizes, strides)
    if order is not None:
        shape = tuple(sizes[d] for d in order)
    else:
        span = 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) if 0 not in sizes else 0
        shape = (span,)
    tensor = torch_door.new_tensor(tuple(sizes), tuple(strides), dtype)
    tensor.untyped_storage()._tpu_buffer = make(kind(shape, element))  # type: ignore[attr-defined]
    return tensor


def contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = [1] * len(sizes)
    for d in range(len(sizes) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(sizes[d + 1], 1)
    return tuple(strides)


def dense_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The order of dimensions, outermost in memory first, of a dense layout; None when it has gaps or overlaps."""
    rank = len(sizes)
    order = sorted(range(rank), key=lambda d: (-strides[d], d)) if 0 not in sizes else list(range(rank))
    # A dimension of size one may carry any stride; it must not disturb the order of the others.
    expected = 1
    for d in reversed(order):
        if sizes[d] != 1:
            if strides[d] != expected and 0 not in sizes:
                return _order_without_ones(sizes, strides)
            expected *= sizes[d]
    return tuple(order)


def _order_without_ones(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    ones = [d for d in range(len(sizes)) if sizes[d] == 1]
    order = sorted((d for d in range(len(sizes)) if sizes[d] != 1), key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            return None
        expected *= sizes[d]
    return tuple(ones + order)


