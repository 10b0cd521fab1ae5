"""The data of a storage: one JAX array, hung on the storage's Python object, shared by all its views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..runtime import dtypes, memory, transfer
from . import torch_door


class Buffer:
    """Device memory of one storage.

    `shape` is the shape in which the array was made (a tensor is a strided window on it, row-major). `array` is None
    while nothing was written: `torch.empty` costs no memory until its first use. `shared` says that somebody outside
    holds the array too (`to_jax`), so it must not be donated.
    """

    __slots__ = ("_array", "_bytes", "dtype", "shape", "shared")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, array: Any = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.shared = False
        self._array = array
        self._bytes = 0
        nbytes = math.prod(shape) * dtype.itemsize
        memory.reserve(nbytes)
        self._bytes = nbytes

    def array(self) -> Any:
        if self._array is None:
            self._array = _zeros(self.shape, self.dtype)
        return self._array

    def written(self) -> bool:
        return self._array is not None

    def rebind(self, array: Any) -> None:
        """Takes a new array as the storage's data (same number of bytes)."""
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.shared = False

    def __del__(self) -> None:
        memory.release(self._bytes)


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return transfer.to_device(torch.zeros(shape, dtype=dtypes.to_torch(dtype)))


def of(tensor: torch.Tensor) -> Buffer | None:
    """The buffer behind a tensor; None when it is not on the device."""
    return getattr(tensor.untyped_storage(), "_tpu_buffer", None)


def wrap(array: Any, sizes: Sequence[int] | None = None, strides: Sequence[int] | None = None) -> torch.Tensor:
    """A new tensor over an array. With sizes and strides, the array holds the elements in memory order."""
    shape = array.shape
    if sizes is None:
        sizes, strides = shape, contiguous(shape)
    assert strides is not None
    tensor = torch_door.new_tensor(sizes, strides, dtypes.to_torch(array.dtype))
    tensor.untyped_storage()._tpu_buffer = Buffer(shape, array.dtype, array)  # type: ignore[attr-defined]
    return tensor


def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is taken at its first use, and is zero then."""
    kind = dtypes.to_numpy(dtype)
    order = dense_order(sizes, strides)
    if order is not None:
        shape = tuple(sizes[d] for d in order)
    else:
        span = 1 + sum((n - 1) * s for n, s in zip(sizes, strides)) if 0 not in sizes else 0
        shape = (span,)
    tensor = torch_door.new_tensor(tuple(sizes), tuple(strides), dtype)
    tensor.untyped_storage()._tpu_buffer = Buffer(shape, kind)  # type: ignore[attr-defined]
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


