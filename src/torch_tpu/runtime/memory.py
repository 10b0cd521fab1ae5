"""Accounting of device memory: bytes held by live buffers, their peak, and the bound of a virtual chip."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from . import platform


@dataclass
class Counters:
    """Of one quantity: now, its peak, and its sums since the last reset."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def remove(self, amount: int) -> None:
        self.current -= amount
        self.freed += amount


BYTES = Counters()
BUFFERS = Counters()
out_of_memory = 0  # how often a virtual chip's bound was hit

# Reentrant: the garbage collector may free a buffer while this thread counts another.
_lock = threading.RLock()
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
    global out_of_memory
    with _lock:
        if nbytes > limit() - BYTES.current and platform.choose().virtual:
            out_of_memory += 1
            raise torch.OutOfMemoryError(
                f"tpu: out of memory while {doing}: {_mib(nbytes)} asked for, {_mib(BYTES.current)} of "
                f"{_mib(limit())} in use. Free tensors you no longer need, use a smaller batch or a narrower dtype; "
                "a virtual chip's memory is set by TORCH_TPU_VIRTUAL_HBM.")
        if nbytes:
            BYTES.add(nbytes)
            BUFFERS.add(1)


def release(nbytes: int) -> None:
    """Counts a buffer (of more than 0 bytes) out again."""
    with _lock:
        BYTES.remove(nbytes)
        BUFFERS.remove(1)


def allocated() -> int:
    return BYTES.current


def peak() -> int:
    return BYTES.peak


def allocations() -> int:
    return BUFFERS.allocated


def reset_peak() -> None:
    with _lock:
        for counters in (BYTES, BUFFERS):
            counters.peak = counters.current


def reset_sums() -> None:
    """Forgets what was allocated and freed so far."""
    global out_of_memory
    with _lock:
        out_of_memory = 0
        for counters in (BYTES, BUFFERS):
            counters.allocated = counters.freed = 0


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
