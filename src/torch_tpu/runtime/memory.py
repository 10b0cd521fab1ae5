"""Accounting of device memory: bytes held by live buffers, their peak, and the bound of a virtual chip."""

from __future__ import annotations

import threading

import torch

from . import platform

_lock = threading.Lock()
_allocated = 0
_peak = 0
_allocations = 0
_limit: int | None = None


def limit() -> int:
    """HBM of the chip in bytes."""
    global _limit
    if _limit is None:
        _limit = platform.hbm_bytes()
    return _limit


def reserve(nbytes: int, doing: str = "allocating a tensor") -> None:
    """Counts a new buffer.

    Raises:
        torch.OutOfMemoryError: a virtual chip's memory would be exceeded (a real chip's allocator decides itself).
    """
    global _allocated, _peak, _allocations
    with _lock:
        if nbytes > limit() - _allocated and platform.choose().virtual:
            raise torch.OutOfMemoryError(
                f"tpu: out of memory while {doing}: {_mib(nbytes)} asked for, {_mib(_allocated)} of "
                f"{_mib(limit())} in use. Free tensors you no longer need, use a smaller batch or a narrower dtype; "
                "a virtual chip's memory is set by TORCH_TPU_VIRTUAL_HBM.")
        _allocated += nbytes
        _allocations += 1
        _peak = max(_peak, _allocated)


def release(nbytes: int) -> None:
    global _allocated
    with _lock:
        _allocated -= nbytes


def allocated() -> int:
    return _allocated


def peak() -> int:
    return _peak


def allocations() -> int:
    return _allocations


def reset_peak() -> None:
    global _peak
    with _lock:
        _peak = _allocated


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
