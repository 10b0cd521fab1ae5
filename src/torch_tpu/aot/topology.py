"""The chips that programs are compiled for, by the names Google Cloud gives them. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One device of a generation, as a program sees it. Rates are those of Google's system architecture pages, which
    are per chip, divided by the devices of a chip.

    Attributes:
        grid: libtpu's name of one chip.
        config: libtpu's chip configuration, where it is not the default.
        devices: devices a chip; a program of one device has that part of the chip.
        flops: products and sums of bfloat16 a second, of the device.
        bandwidth: bytes a second between HBM and the device.
        hbm: bytes of HBM that programs of the device may use, as libtpu 0.0.42.1 states them when a program needs more.
    """

    name: str
    grid: str
    config: str
    devices: int
    flops: float
    bandwidth: float
    hbm: int


def _chip(name: str, grid: str, teraflops: float, gigabytes_s: float, hbm_gib: float, config: str = "",
          devices: int = 1) -> Chip:
    return Chip(name, grid, config, devices, teraflops * 1e12 / devices, gigabytes_s * 1e9 / devices,
                int(hbm_gib * 2**30))


GENERATIONS = {chip.name: chip for chip in (
    _chip("v4", "v4:1x1x1", 275, 1228, 30.75, config="megacore"),
    _chip("v5e", "v5e:1x1", 197, 819, 15.75),
    _chip("v5p", "v5p:1x1x1", 459, 2765, 95.74),
    _chip("v6e", "v6e:1x1", 918, 1640, 31.25),
    _chip("v7x", "tpu7x:1x1x1", 2307, 7380, 94.75, devices=2),
)}


def parse(name: str) -> Chip:
    """The chip of a topology such as "v5e-1".

    Raises:
        ValueError: the name is not understood, or means several chips.
    """
    generation, _, count = name.partition("-")
    known = ", ".join(f"{each}-1" for each in GENERATIONS)
    if generation not in GENERATIONS or (count and not count.isdecimal()):
        raise ValueError(f"topology {name!r} is not known; it is one of {known}")
    if count not in ("", "1"):
        raise ValueError(f"topology {name!r} has several chips; programs are compiled ahead for one chip only, so give "
                         f"{generation}-1 ({known})")
    return GENERATIONS[generation]
