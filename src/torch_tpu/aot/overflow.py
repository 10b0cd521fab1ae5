"""Which memory of a chip a program overflows, from the words of libtpu's compiler (tried on libtpu 0.0.42.1).

A chip has HBM (gigabytes, where tensors are), VMEM (128 MiB on the chip, from which each kernel gets a part, its
"scoped" VMEM), and SMEM (1 MiB for scalars).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAMES = {"hbm": "HBM", "vmem": "VMEM", "smem": "SMEM", "cmem": "CMEM", "sflag": "SFLAG", "host": "host memory"}
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HBM = re.compile(r"Ran out of memory on HBM, [^(]*\(([\d.]+\w?)\) exceeds available HBM \(([\d.]+\w?)\)")
_SPACE = re.compile(r"Ran out of memory in memory space (\w+)\. Used ([\d.]+\w?) of ([\d.]+\w?) ")
_SCOPED = re.compile(r"Ran out of memory in memory space (\w+) while allocating on stack for %?([\w.\-]+)"
                     r".*?Scoped allocation with size ([\d.]+\w?) and limit ([\d.]+\w?)", re.S)
_ALLOCATION = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?space=(\w+)(.*)", re.S)
_ENTRY = re.compile(r"^\s*\d+\. Size: ([\d.]+\w?)\n(.*?)^\s*={5,}", re.S | re.M)


@dataclass(frozen=True)
class Overflow:
    """A memory that is too small.

    Attributes:
        memory: "HBM", "VMEM", "scoped VMEM" (of one kernel), "SMEM"; "" where the compiler's words are not understood.
        problem: one line that says so.
        needed: bytes, in the compiler's rounding.
        limit: bytes that there are.
        largest: what takes most of it, where the compiler says so: what it is, and bytes.
    """

    memory: str
    problem: str
    needed: int | None = None
    limit: int | None = None
    largest: tuple[tuple[str, int], ...] = ()


def understood(text: str) -> Overflow:
    """The overflow that an error of the compiler, RESOURCE_EXHAUSTED, is about."""
    text = text.strip().removeprefix("RESOURCE_EXHAUSTED: ")
    kernel = re.search(r"%?([\w.\-]+) = [^\n]*custom-call", text)
    where = f", in the kernel {kernel.group(1)}" if kernel and "tpu_custom_call" in text else ""
    if found := _SCOPED.search(text):
        space, name, needed, limit = found.groups()
        where = f", in {'the kernel ' if 'tpu_custom_call' in text else ''}{name}"
        return _overflow(f"scoped {_name(space)}", needed, limit, where, text)
    if found := _HBM.search(text):
        needed, limit = found.groups()
        return _overflow("HBM", needed, limit, "", text)
    if found := _SPACE.search(text):
        space, needed, limit = found.groups()
        name = _name(space)
        scoped = name != "HBM" and "Allocation type: scoped" in text
        return _overflow(f"scoped {name}" if scoped else name, needed, limit, where, text)
    if found := _ALLOCATION.search(text):
        needed, limit, space, rest = found.groups()
        name = re.search(r"\] :: ([\w.\-]+)", rest)
        tag = re.search(r"tag = '([^'\n]*)'", rest)
        scoped = ", scoped" in rest and _name(space) != "SMEM"
        where = f", in the kernel {name.group(1)}" if name else ""
        made = _overflow(f"scoped {_name(space)}" if scoped else _name(space), needed, limit, where, text)
        return Overflow(made.memory, made.problem, made.needed, made.limit,
                        ((_short(tag.group(1)) if tag else "an allocation", int(needed)),))
    return Overflow("", text.splitlines()[0] if text else "the compiler ran out of a memory that it does not name")


def hbm(needed: int, limit: int) -> Overflow:
    """A program that the compiler took, and that needs more than there is."""
    return _overflow("HBM", str(needed), str(limit), "", "")


def _overflow(memory: str, needed: str, limit: str, where: str, text: str) -> Overflow:
    largest = tuple((_what(inside), _bytes(size)) for size, inside in _ENTRY.findall(text))
    return Overflow(memory, f"it needs {_shown(needed)} of {memory}{where}, and {_shown(limit)} are there",
                    _bytes(needed), _bytes(limit), largest)


def _what(inside: str) -> str:
    """An allocation in the compiler's list: a module's operation, or what the compiler calls it."""
    for pattern in (r'op_name="([^"]*)"', r"Tag: ([^\n]*)", r"XLA label: ([\w.\-]+)", r"Shape: ([^\n]*)"):
        if found := re.search(pattern, inside):
            return _short(found.group(1))
    return "an allocation"


def _short(text: str) -> str:
    return text.split(". The u8 shape")[0].strip()


def _name(space: str) -> str:
    return _NAMES.get(space.lower(), space)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([\d.]+)(\w?)", text)
    assert found is not None
    return round(float(found.group(1)) * _UNITS[found.group(2)])


def _shown(text: str) -> str:
    value = _bytes(text)
    for unit, step in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= step:
            return f"{value / step:,.2f} {unit}"
    return f"{value} B"
