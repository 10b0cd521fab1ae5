"""Transformers' caches where they name CUDA (tried on 5.20.2 to 5.25.0): offloaded ones, the size of the paged one."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import torch

from ..runtime import platform
from . import on_import

_MEMORY = "get_device_and_memory_breakdown"
VIRTUAL_SHARE = 4  # a paged cache may take one part in so many of a virtual chip's free memory, which is the host's


def install() -> None:
    on_import.after("transformers.cache_utils", _offloaded)
    on_import.after("transformers.generation.utils", _no_program)
    on_import.after("transformers.generation.continuous_batching.requests", _memory_before)
    on_import.after("transformers.generation.continuous_batching.utils", _memory)


def _offloaded(module: ModuleType) -> None:
    kind = module.Cache
    theirs = kind.update
    if not (hasattr(kind, "prefetch") and hasattr(kind, "offload")):
        raise AttributeError("Cache has no prefetch and offload")

    @functools.wraps(theirs)
    def update(self: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Theirs orders its copies by two CUDA streams; on tpu whoever reads an array waits for it."""
        if not self.offloading or key_states.device.type != "tpu":
            return theirs(self, key_states, value_states, layer_idx, *args, **kwargs)
        if self.layer_class_to_replicate is not None:
            while len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class_to_replicate())
        self.prefetch(layer_idx + 1, self.only_non_sliding)
        self.offloading = False
        try:
            found = theirs(self, key_states, value_states, layer_idx, *args, **kwargs)
        finally:
            self.offloading = True
        self.offload(layer_idx, self.only_non_sliding)
        return found

    made = kind.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.offloading:  # only then: Dynamo traces Transformers' own
            self.update = functools.partial(update, self)

    kind.__init__ = __init__


def _no_program(module: ModuleType) -> None:
    """A cache whose layers come and go between host and chip is no argument of a compiled program."""
    mixin = module.GenerationMixin
    theirs = mixin._valid_auto_compile_criteria

    @functools.wraps(theirs)
    def _valid_auto_compile_criteria(self: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> bool:
        cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if self.device.type == "tpu" and getattr(cache, "offloading", False):
            return False
        return theirs(self, model_kwargs, *args, **kwargs)

    mixin._valid_auto_compile_criteria = _valid_auto_compile_criteria


def _memory_before(module: ModuleType) -> None:
    """Transformers before 5.22 has the function here; later ones have one that says where it went."""
    theirs = getattr(module, _MEMORY, None)
    if theirs is not None and "cuda" in theirs.__code__.co_names:
        _memory(module)


def _memory(module: ModuleType) -> None:
    if not hasattr(module, _MEMORY) and hasattr(sys.modules.get(module.__name__.replace("utils", "requests")), _MEMORY):
        return  # the one above
    theirs = module.get_device_and_memory_breakdown

    @functools.wraps(theirs)
    def get_device_and_memory_breakdown() -> tuple[torch.device, int, int, int]:
        """The chip's memory, where theirs would size the cache by the host's."""
        found = theirs()
        if found[0].type != "cpu":
            return found
        free, total = torch.tpu.mem_get_info(0)  # type: ignore[attr-defined]
        used = total - free
        if platform.choose().virtual:
            total = used + free // VIRTUAL_SHARE
        return torch.device("tpu", 0), total, used, used

    module.get_device_and_memory_breakdown = get_device_and_memory_breakdown  # type: ignore[attr-defined]
