"""Accounting of device memory: bytes held by live buffers, their peak, and the bound of a virtual chip."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import torch

from . import platform


@dataclass(slots=True)
class Counters:
    """Of one quantity: now, its peak, and its sums since the last reset."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0


BYTES = Counters()
BUFFERS = Counters()
out_of_memory = 0  # how often a virtual chip's bound was hit

_lock = threading.Lock()
_limit: int | None = None
_bound: float | None = None  # what a buffer must stay below; infinite on a real chip, whose allocator decides itself


def limit() -> int:
    """HBM of the chip in bytes."""
    global _limit
    if _limit is None:
        _limit = platform.hbm_bytes()
    return _limit


def reserve(nbytes: int) -> None:
    """Counts a new buffer of more than 0 bytes. Called for every result of every operator: no lock. CPython changes
    threads, and runs the garbage collector's finalizers, only at calls and backward jumps, and from the test of the
    bound to the last line there is neither.

    Raises:
        torch.OutOfMemoryError: a virtual chip's memory would be exceeded.
    """
    if _bound is None:
        _set_bound()
    held, count = BYTES, BUFFERS
    now = held.current + nbytes
    if now > _bound:  # type: ignore[operator]
        _refuse(nbytes)
    held.current = now
    held.allocated += nbytes
    if now > held.peak:
        held.peak = now
    count.current = now = count.current + 1
    count.allocated += 1
    if now > count.peak:
        count.peak = now


def release(nbytes: int) -> None:
    """Counts a buffer (of more than 0 bytes) out again."""
    held, count = BYTES, BUFFERS
    held.current -= nbytes
    held.freed += nbytes
    count.current -= 1
    count.freed += 1


def _set_bound() -> None:
    global _bound
    _bound = limit() if platform.choose().virtual else math.inf


def _refuse(nbytes: int) -> None:
    global out_of_memory
    out_of_memory += 1
    raise torch.OutOfMemoryError(
        f"tpu: out of memory while allocating a tensor: {_mib(nbytes)} asked for, {_mib(BYTES.current)} of "
        f"{_mib(limit())} in use. Free tensors you no longer need, use a smaller batch or a narrower dtype; "
        "a virtual chip's memory is set by TORCH_TPU_VIRTUAL_HBM.")


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
