"""Decides what stands behind the device: TPU chips, virtual chips on XLA's CPU client, or a GPU. No JAX here."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from . import config

# PCI ids of Google's accelerators (vendor 0x1ae0), as the Linux kernel lists them.
_VENDOR = "0x1ae0"
_GENERATIONS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7x"}

# HBM per chip in GiB, from Google's system architecture pages.
HBM_GIB = {"v2": 16, "v3": 32, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "v7x": 192}


@dataclass(frozen=True)
class Platform:
    """What runs the device. `name` is a JAX platform; `chips` is None where only the client knows."""

    name: str
    reason: str
    generation: str
    chips: int | None

    @property
    def virtual(self) -> bool:
        return self.name == "cpu"


@functools.cache
def scan_chips() -> tuple[str, int]:
    """(generation, number) of the TPU chips on this host's PCI bus; ("", 0) when there is none."""
    found: dict[str, int] = {}
    root = Path("/sys/bus/pci/devices")
    try:
        for device in root.iterdir():
            if (device / "vendor").read_text().strip() == _VENDOR:
                generation = _GENERATIONS.get((device / "device").read_text().strip())
                if generation:
                    found[generation] = found.get(generation, 0) + 1
    except OSError:
        return "", 0
    return max(found.items(), key=lambda item: item[1]) if found else ("", 0)


def has_libtpu() -> bool:
    """Whether the package that drives TPU chips is installed."""
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def choose() -> Platform:
    """The platform of this process, by TORCH_TPU_PLATFORM and by what the host has.

    Raises:
        SettingError: a TORCH_TPU_* variable is not understood.
        RuntimeError: TPU chips were demanded and libtpu is not installed.
    """
    config.check()
    wanted = config.PLATFORM.choice("auto", "tpu", "cpu", "cuda")
    generation, chips = scan_chips()
    if wanted == "tpu" or (wanted == "auto" and chips and has_libtpu()):
        if not has_libtpu():
            raise RuntimeError("TORCH_TPU_PLATFORM=tpu needs libtpu: pip install 'torch_tpu[tpu]'")
        why = f"{chips} {generation} chip(s) found" if chips else "TORCH_TPU_PLATFORM=tpu"
        return Platform("tpu", why, generation or "tpu", chips or None)
    if wanted == "cuda":
        return Platform("cuda", "TORCH_TPU_PLATFORM=cuda", "cuda", None)
    if wanted == "cpu":
        why = "TORCH_TPU_PLATFORM=cpu"
    elif chips:
        why = f"{chips} {generation} chip(s) found, but libtpu is not installed: pip install 'torch_tpu[tpu]'"
    else:
        why = "no TPU chip on this host"
    return Platform("cpu", why, "virtual", config.VIRTUAL_CHIPS.positive())


def hbm_bytes() -> int:
    """Memory of one chip in bytes: of a virtual chip TORCH_TPU_VIRTUAL_HBM, else three quarters of the RAM."""
    platform = choose()
    if platform.virtual:
        given = config.VIRTUAL_HBM.size()
        if given is not None:
            return given
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4 // (platform.chips or 1)
    return HBM_GIB.get(platform.generation, 16) * 2**30
