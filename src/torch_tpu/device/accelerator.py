"""torch.accelerator for tpu. Its functions end in C++ (torch 2.13), where a Python backend has no streams, allocator or
synchronisation; these take them where the accelerator is tpu, and leave other accelerators to PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..runtime import chips
from . import memory, properties, streams


def _synchronize(device: chips.Device = None, /) -> None:
    from ..runtime import client

    chips.check(device)
    client.synchronize()


def _set_device_index(device: chips.Device, /) -> None:
    # A negative index changes nothing, as PyTorch documents.
    if not (isinstance(device, int) and device < 0):
        chips.check(device)


_ROUTES: dict[str, Callable[..., Any]] = {
    "synchronize": _synchronize,
    "set_device_index": _set_device_index,
    "current_stream": lambda device=None, /: streams.current_stream(device),
    "set_stream": streams.set_stream,
    "get_device_capability": lambda device=None, /: properties.get_device_capability(device),
}
_MEMORY_ROUTES: dict[str, Callable[..., Any]] = {
    "empty_cache": memory.empty_cache,
    "empty_host_cache": lambda: None,
    "memory_stats": lambda device_index=None, /: memory.memory_stats(device_index),
    "reset_accumulated_memory_stats": lambda device_index=None, /: memory.reset_accumulated_memory_stats(device_index),
    "reset_peak_memory_stats": lambda device_index=None, /: memory.reset_peak_memory_stats(device_index),
    "get_memory_info": lambda device_index=None, /: memory.mem_get_info(device_index),
}


def _is_tpu() -> bool:
    return torch.accelerator.current_accelerator() == torch.device("tpu")


def _route(modules: tuple[ModuleType, ...], name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(modules[0], name, None)
    if theirs is None:  # a later torch without this function
        return

    @functools.wraps(theirs)
    def routed(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if _is_tpu() else theirs(*args, **kwargs)

    for module in modules:
        setattr(module, name, routed)


def install() -> None:
    api = torch.accelerator
    for name, ours in _ROUTES.items():
        _route((api,), name, ours)
    for name, ours in _MEMORY_ROUTES.items():
        _route((api.memory, api), name, ours)
    theirs = api.device_index.__enter__

    def enter(self: Any) -> None:
        if _is_tpu():
            chips.check(self.idx)
        theirs(self)

    api.device_index.__enter__ = enter  # type: ignore[method-assign]
