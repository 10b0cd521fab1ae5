"""Memory statistics of torch.tpu. Bytes are those of live tensors as torch counts them; "reserved" is what XLA holds on
a real chip, programs included, and the same as "allocated" on a virtual one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..runtime import chips, client, memory
from ..runtime.chips import Device

_METRICS = ("current", "peak", "allocated", "freed")


def _chip_stats() -> dict[str, int]:
    """The statistics of a real chip's own allocator; empty on virtual chips and before the start."""
    if not client.started() or client.get().platform.virtual:
        return {}
    return client.get().device.memory_stats() or {}


def memory_stats(device: Device = None) -> OrderedDict[str, Any]:
    """Statistics under torch.cuda's names: "allocated_bytes.all.current", "reserved_bytes.all.peak", ..."""
    chips.check(device)
    chip = _chip_stats()
    stats: dict[str, Any] = {}
    for metric in _METRICS:
        stats[f"allocation.all.{metric}"] = getattr(memory.BUFFERS, metric)
        stats[f"allocated.all.{metric}"] = getattr(memory.BUFFERS, metric)
        stats[f"active.all.{metric}"] = getattr(memory.BUFFERS, metric)
        for name in ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"):
            stats[f"{name}.all.{metric}"] = getattr(memory.BYTES, metric)
    if chip:
        stats["reserved_bytes.all.current"] = chip.get("bytes_in_use", memory.BYTES.current)
        stats["reserved_bytes.all.peak"] = chip.get("peak_bytes_in_use", memory.BYTES.peak)
    stats["num_ooms"] = memory.out_of_memory
    stats["num_alloc_retries"] = 0
    stats["num_device_alloc"] = memory.BUFFERS.allocated
    stats["num_device_free"] = memory.BUFFERS.freed
    return OrderedDict(sorted(stats.items()))


def memory_allocated(device: Device = None) -> int:
    """Bytes of live tensors."""
    chips.check(device)
    return memory.allocated()


def max_memory_allocated(device: Device = None) -> int:
    """The largest `memory_allocated` since the start or the last reset_peak_memory_stats()."""
    chips.check(device)
    return memory.peak()


def memory_reserved(device: Device = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Device = None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes of the chip."""
    chips.check(device)
    chip = _chip_stats()
    total = chip.get("bytes_limit") or memory.limit()
    used = chip.get("bytes_in_use", memory.allocated())
    return max(total - used, 0), total


def reset_peak_memory_stats(device: Device = None) -> None:
    chips.check(device)
    memory.reset_peak()


def reset_accumulated_memory_stats(device: Device = None) -> None:
    chips.check(device)
    memory.reset_sums()


reset_max_memory_allocated = reset_peak_memory_stats


def empty_cache() -> None:
    """Gives back memory that no tensor uses. XLA keeps none on a chip; on virtual chips the host's allocator does."""
    if client.started() and client.get().platform.virtual:
        client.trim()


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """The statistics as a table to print."""
    free, total = mem_get_info(device)
    rows = [("tensors", memory.BYTES.current, memory.BYTES.peak), ("reserved by XLA", memory_reserved(device),
                                                                    max_memory_reserved(device))]
    lines = [f"{'tpu:0':<18}{'now':>14}{'peak':>14}"]
    lines += [f"{name:<18}{_mib(now):>14}{_mib(peak):>14}" for name, now, peak in rows]
    lines.append(f"{'free of total':<18}{_mib(free):>14}{_mib(total):>14}")
    if not abbreviated:
        lines.append(f"{'live tensors':<18}{memory.BUFFERS.current:>14,}{memory.BUFFERS.peak:>14,}")
        lines.append(f"{'out of memory':<18}{memory.out_of_memory:>14,}")
    return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
