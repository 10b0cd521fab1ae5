"""What torch.tpu tells of the chip. Starts JAX only for a real chip whose generation the PCI bus does not tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..runtime import chips, memory, platform
from ..runtime.chips import Device


@dataclass(frozen=True)
class DeviceProperties:
    """A chip.

    Attributes:
        name: for people.
        generation: "v5e", "v6e", ..., or "virtual".
        total_memory: HBM in bytes.
        platform: what runs it: "tpu", "cpu" (virtual chips) or "cuda".
        virtual: it is XLA's CPU client, not a chip.
        multi_processor_count: 1; a chip runs one program at a time.
    """

    name: str
    generation: str
    total_memory: int
    platform: str
    virtual: bool
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def get_device_properties(device: Device = None) -> DeviceProperties:
    chips.check(device)
    chosen = platform.choose()
    if chosen.virtual:
        name = "virtual TPU chip (XLA on the CPU)"
    elif chosen.name == "tpu" and chosen.generation in platform.HBM_GIB:
        name = f"TPU {chosen.generation}"
    else:
        from ..runtime import client

        name = client.get().device.device_kind
    return DeviceProperties(name, chosen.generation, memory.limit(), chosen.name, chosen.virtual)


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


# runtime/dtypes.py has them as well, with their NumPy counterparts; this list must not need ml_dtypes.
_SUPPORTED = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16",
              "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
              "float8_e5m2fnuz", "float8_e8m0fnu")


def get_device_capability(device: Device = None) -> dict[str, Any]:
    """{"supported_dtypes": set of torch.dtype}, as torch.accelerator.get_device_capability gives it. A TPU has no
    compute capability in CUDA's sense."""
    chips.check(device)
    return {"supported_dtypes": {getattr(torch, name) for name in _SUPPORTED}}


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True
