"""The chips that programs are compiled for: a generation and a number of chips, "v5e-4". No JAX here."""

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
        interconnect: bytes a second that a device exchanges with its neighbours, all links together.
    """

    name: str
    grid: str
    config: str
    devices: int
    flops: float
    bandwidth: float
    hbm: int
    interconnect: float


@dataclass(frozen=True)
class Slice:
    """Chips that a program runs on together.

    Attributes:
        chip: one of their devices.
        devices: how many devices there are.
        grid: libtpu's name of the slice.
        bounds: libtpu's chips per host, where it has to be told.
    """

    name: str
    chip: Chip
    devices: int
    grid: str
    bounds: tuple[int, ...] | None


def _chip(name: str, grid: str, teraflops: float, gigabytes_s: float, hbm_gib: float, gigabits_s: float,
          config: str = "", devices: int = 1) -> Chip:
    return Chip(name, grid, config, devices, teraflops * 1e12 / devices, gigabytes_s * 1e9 / devices,
                int(hbm_gib * 2**30), gigabits_s * 1e9 / 8 / devices)


GENERATIONS = {chip.name: chip for chip in (
    _chip("v4", "v4:1x1x1", 275, 1228, 30.75, 2400, config="megacore"),
    _chip("v5e", "v5e:1x1", 197, 819, 15.75, 1600),
    _chip("v5p", "v5p:1x1x1", 459, 2765, 95.74, 4800),
    _chip("v6e", "v6e:1x1", 918, 1640, 31.25, 3584),
    _chip("v7x", "tpu7x:1x1x1", 2307, 7380, 94.75, 9600, devices=2),
)}


# How chips of a slice are arranged, by their number: a torus of two or of three dimensions.
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_DEEP = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}


def sizes(chip: Chip) -> list[int]:
    """How many devices slices of a generation have."""
    return [1] + [count * chip.devices for count in _shapes(chip)]


def _shapes(chip: Chip) -> dict[int, str]:
    return _DEEP if chip.grid.count("x", chip.grid.index(":")) == 2 else _FLAT


def parse(name: str) -> Slice:
    """A slice by its name: a generation and a number of chips, such as "v5e-4". One chip is one device of it.

    Raises:
        ValueError: the name is not understood.
    """
    generation, _, count = name.partition("-")
    known = ", ".join(f"{each}-1" for each in GENERATIONS)
    if generation not in GENERATIONS or (count and not count.isdecimal()):
        raise ValueError(f"topology {name!r} is not known; it is a generation and a number of chips, such as {known}, "
                         "v5e-4")
    chip = GENERATIONS[generation]
    if count in ("", "1"):
        return Slice(name, chip, 1, chip.grid, (1, 1, 1))
    family = chip.grid.partition(":")[0]
    shapes = _shapes(chip)
    if int(count) not in shapes:
        raise ValueError(f"topology {name!r}: slices of {generation} have 1, {', '.join(map(str, shapes))} chips")
    return Slice(name, chip, int(count) * chip.devices, f"{family}:{shapes[int(count)]}", None)
