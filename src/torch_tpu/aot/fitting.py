"""What a program's memory is made of, and what would make one fit that does not."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .overflow import Overflow
from .topology import GENERATIONS, Slice, sizes
from .tracing import Argument

PARTS = ("weights", "keys and values", "optimizer state", "inputs")
_INPUTS = ("argument ", "a number", "random keys", "a tensor of the host")


def part(argument: Argument) -> str:
    """Which of PARTS an argument is of, by its name."""
    if argument.name == "optimizer state":
        return "optimizer state"
    if argument.name.startswith(_INPUTS):
        return "inputs"
    return "keys and values" if re.search(r"\.(keys|values)$", argument.name) else "weights"


def parts(arguments: Iterable[Argument]) -> dict[str, int]:
    """Bytes of each part on one chip, without padding."""
    found = dict.fromkeys(PARTS, 0)
    for each in arguments:
        found[part(each)] += each.nbytes
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def advice(held: dict[str, int], overflow: Overflow, chips: Slice, wide: bool) -> tuple[str, ...]:
    """What would make a program fit.

    Args:
        held: `parts` of the program.
        wide: whether most weights are float32.
    """
    if overflow.memory != "HBM" or overflow.needed is None:
        return _of_kernels(overflow)
    needed, hbm = overflow.needed, chips.chip.hbm
    over = needed - hbm
    found = []
    weights, cache, state = (held.get(name, 0) for name in ("weights", "keys and values", "optimizer state"))
    split = "fsdp" if state else "tp"
    more = next((n for n in sizes(chips.chip) if n > chips.devices and needed * chips.devices / n < 0.95 * hbm), None)
    if more is not None:
        found.append(f"{more} chips ({chips.chip.name}-{more // chips.chip.devices}, {split}={more}: about "
                     f"{_gib(needed * chips.devices / more)} each)")
    others = [chip.name for chip in GENERATIONS.values() if chip.hbm > hbm and needed < 0.95 * chip.hbm]
    if others:
        found.append(f"a chip with more HBM ({', '.join(others)})")
    if wide and weights / 2 >= over:
        found.append(f"bfloat16 instead of float32 weights ({_gib(weights / 2)} less)")
    elif not wide and not state and weights / 2 >= over:
        found.append(f"weights of 8 bits ({_gib(weights / 2)} less)")
    if cache > over:
        found.append(f"{100 * (cache - over) / cache:.0f} % of the keys and values: a smaller cache or batch")
    rest = needed - sum(held.values())
    if rest > over:
        found.append(f"{100 * (rest - over) / rest:.0f} % of the temporaries ({_gib(rest)}): a smaller batch or "
                     "shorter sequences" + (", or torch.utils.checkpoint" if state else ""))
    return tuple(found) or ("more chips, along several axes (tp=, fsdp=), and a smaller model or batch",)


def _of_kernels(overflow: Overflow) -> tuple[str, ...]:
    if overflow.memory == "SMEM":
        return ("fewer or smaller scalars (SMEM scratch and prefetched scalars) in the Pallas kernel",)
    if overflow.memory == "scoped VMEM":
        return ("smaller blocks in the Pallas kernel (each input and output block is there twice)",
                "a larger part of VMEM for it: pltpu.CompilerParams(vmem_limit_bytes=...)")
    if overflow.memory:
        return ("smaller blocks in the Pallas kernel, or less that is kept on the chip",)
    return ("a narrower dtype, a smaller batch, or more chips",)


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"
