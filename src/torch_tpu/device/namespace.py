"""What torch.tpu says about names that it does not have, and its submodules: `import torch.tpu.distributed` finds the
package that implements it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__path__: list[str] = []  # makes torch.tpu a package; its submodules come from the finder below

SUBMODULES = {
    "compiler": "torch_tpu.compile.compiler",
    "debug": "torch_tpu.device.debug",
    "distributed": "torch_tpu.distributed",
    "memory": "torch_tpu.device.memory",
    "pallas": "torch_tpu.custom",
    "profiler": "torch_tpu.device.profiler",
    "random": "torch_tpu.device.rng",
    "streams": "torch_tpu.device.streams",
}

# Names of torch.cuda that have no counterpart, and what serves instead.
INSTEAD = {
    "CUDAGraph": 'torch.compile(..., backend="tpu"), which makes one executable of the whole graph',
    "graph": 'torch.compile(..., backend="tpu"), which makes one executable of the whole graph',
    "graphs": 'torch.compile(..., backend="tpu"), which makes one executable of the whole graph',
    "make_graphed_callables": 'torch.compile(..., backend="tpu")',
    "amp": 'torch.amp.autocast("tpu") and torch.amp.GradScaler("tpu")',
    "nvtx": "torch.profiler.record_function",
    "nccl": "torch.distributed, whose backend for tpu needs no NCCL",
    "set_per_process_memory_fraction": "TORCH_TPU_VIRTUAL_HBM for virtual chips; XLA owns a real chip's memory",
    "memory_snapshot": "torch.tpu.memory_stats()",
    "caching_allocator_alloc": "torch.empty(n, dtype=torch.uint8, device='tpu')",
    "caching_allocator_delete": "del tensor",
    "CUDAPluggableAllocator": "nothing: XLA owns the chip's memory",
    "MemPool": "nothing: XLA owns the chip's memory",
    "utilization": "torch.tpu.memory_stats(), or `tpu-info` on a TPU VM",
    "temperature": "`tpu-info` on a TPU VM",
    "power_draw": "`tpu-info` on a TPU VM",
    "clock_rate": "`tpu-info` on a TPU VM",
    "get_arch_list": "torch.tpu.get_device_properties().generation",
    "get_gencode_flags": "torch.tpu.get_device_properties().generation",
    "cudart": "nothing: there is no CUDA runtime here",
    "current_blas_handle": "nothing: XLA chooses the kernels",
    "ExternalStream": "torch.tpu.Stream()",
    "set_sync_debug_mode": "torch.tpu.debug.set_mode(True), which runs every operation synchronously",
    "get_sync_debug_mode": "torch.tpu.debug.set_mode(True), which runs every operation synchronously",
    "jiterator": "torch.tpu.pallas.jax_op, which makes an operator of a JAX or Pallas function",
    "comm": "torch.distributed",
}


def missing(name: str) -> Any:
    """A submodule by its name, or the AttributeError that says what to use instead."""
    target = SUBMODULES.get(name)
    if target is not None and importlib.util.find_spec(target) is not None:
        return importlib.import_module(f"torch.tpu.{name}")
    if name in INSTEAD:
        raise AttributeError(f"torch.tpu has no {name}; use {INSTEAD[name]}")
    import torch

    hint = " (torch.cuda has it, tpu has no such thing)" if not name.startswith("_") and hasattr(
        torch.cuda, name) else ""
    raise AttributeError(f"module 'torch.tpu' has no attribute {name!r}{hint}")


class _Loader(importlib.abc.Loader):
    """Hands on the module that implements a name under torch.tpu."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: Any) -> ModuleType:
        module = importlib.import_module(self.target)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith("torch.tpu."):
            return None
        head, _, rest = fullname.removeprefix("torch.tpu.").partition(".")
        if head not in SUBMODULES:
            return None
        name = SUBMODULES[head] + ("." + rest if rest else "")
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(name))


def install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
