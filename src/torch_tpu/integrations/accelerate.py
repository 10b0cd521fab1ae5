"""Accelerate (tried on 1.15.0): its default device and its idea of free memory know nothing of `tpu`."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch

from . import on_import


def install() -> None:
    on_import.after("accelerate.state", _default_device)
    on_import.after("accelerate.state", _processes)
    on_import.after("accelerate.utils.modeling", _max_memory)


def _default_device(module: ModuleType) -> None:
    state = module.PartialState
    theirs = state.default_device.fget

    def default_device(self: Any) -> torch.device:
        """The tpu chip where Accelerate itself finds nothing better than the CPU."""
        found = theirs(self)
        return torch.device("tpu", 0) if found.type == "cpu" else found

    state.default_device = property(default_device)


def _processes(module: ModuleType) -> None:
    """Several processes under torchrun are one distributed training, not as many separate ones.

    Accelerate's enumeration of distributed types cannot be extended; the code for MULTI_NEURON is its general one.
    """
    state = module.PartialState
    theirs = state._prepare_backend

    @functools.wraps(theirs)
    def _prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        found, kind = theirs(self, cpu, sagemaker_dp, backend)
        launched = int(os.environ.get("LOCAL_RANK", -1)) != -1 and int(os.environ.get("WORLD_SIZE", 1)) > 1
        if cpu or not launched or kind != module.DistributedType.NO or self.default_device.type != "tpu":
            return found, kind
        self.device = torch.device("tpu", 0)
        # DistributedDataParallel must not be told LOCAL_RANK as the number of its chip: each process has one.
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        return backend or "tpu_dist", module.DistributedType.MULTI_NEURON

    state._prepare_backend = _prepare_backend


def _max_memory(module: ModuleType) -> None:
    theirs = module.get_max_memory

    def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
        """Accelerate's, with the chip's free HBM under its index where no other accelerator is found."""
        if max_memory is None:
            found = theirs(None)
            if any(isinstance(key, int) or key == "mps" for key in found):
                return found
            return {0: torch.tpu.mem_get_info(0)[0], **found}  # type: ignore[attr-defined]
        if torch.cuda.is_available():
            return theirs(max_memory)
        # Theirs would warn that device 0 does not exist, counting CUDA devices.
        chips = {k: v for k, v in max_memory.items() if isinstance(k, int)}
        rest = {k: v for k, v in max_memory.items() if not isinstance(k, int)}
        for key, value in chips.items():
            if key != 0:
                raise ValueError(f"max_memory names device {key}; one process drives one chip, which is 0")
            if isinstance(value, str):
                chips[key] = module.convert_file_size_to_int(value)
        return {**chips, **(theirs(rest) if rest else {})}

    get_max_memory._torch_tpu_wraps = theirs  # type: ignore[attr-defined]
    module.get_max_memory = get_max_memory  # type: ignore[attr-defined]
