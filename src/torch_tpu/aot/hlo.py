"""What optimised HLO for a TPU says about a program: what it moves through HBM, how it is padded, what leaves the chip.

Only text is read. Shapes are as the compiler prints them: `bf16[8,64]{1,0:T(8,128)(2,1)S(1)}` is minor to major order,
tiles, and the memory space (none: HBM; S(1): on the chip; S(5): the host).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "bf16": 16, "c64": 64, "c128": 128}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
         "opt-barrier", "domain"}
_HOST = {"send", "recv", "send-done", "recv-done", "infeed", "outfeed"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_HOST_SPACE = 5


@dataclass(frozen=True)
class Shape:
    dtype: str
    sizes: tuple[int, ...]
    order: tuple[int, ...]  # minor to major
    tile: tuple[int, ...]
    space: int

    def nbytes(self) -> int:
        return math.ceil(_bits(self.dtype) * math.prod(self.sizes) / 8)

    def padded(self) -> int:
        """Bytes with whole tiles."""
        sizes = [self.sizes[d] for d in self.order] if self.order else list(self.sizes[::-1])
        for at, tile in enumerate(self.tile[::-1]):
            if at < len(sizes):
                sizes[at] = -(-sizes[at] // tile) * tile
        return math.ceil(_bits(self.dtype) * math.prod(sizes) / 8)


def _bits(dtype: str) -> int:
    found = _BITS.get(dtype)
    if found is None:
        digits = re.search(r"\d+", dtype)
        if digits is None:
            raise ValueError(f"HLO has an element type {dtype!r} of unknown size")
        found = int(digits.group())
    return found


def shapes(text: str) -> list[Shape]:
    """The arrays of a type, those of a tuple in their order."""
    found = []
    for dtype, sizes, layout in _SHAPE.findall(text):
        order, _, rest = (layout or "").partition(":")
        tile = re.search(r"T\(([\d,]*)\)", rest)
        space = re.search(r"S\((\d+)\)", rest)
        found.append(Shape(dtype, _numbers(sizes), _numbers(order), _numbers(tile.group(1)) if tile else (),
                           int(space.group(1)) if space else 0))
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


@dataclass
class Instruction:
    name: str
    opcode: str
    shapes: list[Shape]
    operands: list[str]
    rest: str  # attributes
    root: bool
    inside: str  # of the parentheses: a parameter's number

    def called(self) -> list[str]:
        return re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", self.rest)


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.root)

    def parameter(self, number: int) -> Instruction:
        return next(each for each in self.instructions.values()
                    if each.opcode == "parameter" and each.inside == str(number))

    def users(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions.values() if name in each.operands]


_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all",
                "collective-broadcast"}


@dataclass(frozen=True)
class Collective:
    """An exchange between chips.

    Attributes:
        kind: "all-reduce" and its like.
        nbytes: of the whole that is exchanged, once.
        chips: how many exchange it.
        times: how often in a call.
    """

    kind: str
    nbytes: int
    chips: int
    times: int

    def sent(self) -> float:
        """Bytes that a chip sends in a call: in a ring, an all-reduce of n bytes on k chips sends 2 n (k - 1) / k, the
        others half of that, a permutation n (Thakur et al., Optimization of Collective Communication Operations in
        MPICH, 2005)."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.nbytes * self.times)
        share = (self.chips - 1) / self.chips
        return self.nbytes * share * self.times * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Temporary:
    """A value that a program keeps in HBM for a while.

    Attributes:
        module: of the model, that computes it, with * for numbers that differ; "" where there is none.
        operation: the last step of its computation: "dot_general".
        dtype, sizes: of the array.
        nbytes: with whole tiles.
        times: how many there are of this kind in the program, of which several may share memory.
    """

    module: str
    operation: str
    dtype: str
    sizes: tuple[int, ...]
    nbytes: int
    times: int


_ARGUMENTS = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "dynamic-update-slice", "while",
              "conditional", "call"}


_COPIES = {"copy", "copy-start", "copy-done", "bitcast", "get-tuple-element", "slice-start", "slice-done"}


def named(rest: str) -> tuple[str, str]:
    """The module that an instruction is of, and what it does, by its metadata."""
    found = re.search(r'op_name="([^"]*)"', rest)
    parts = [each for each in (found.group(1) if found else "").split("/") if each and not each.startswith("jit(")]
    return "/".join(parts[:-1][:1]), parts[-1] if parts else ""


def _group(rest: str) -> int:
    """How many chips a collective's groups have, as the compiler writes them."""
    iota = re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", rest)
    if iota:
        return int(iota.group(1))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:
        return listed.group(1).count(",") + 1
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest)
    if named:
        sizes = dict(re.findall(r"'?([\w.]+)'?=(\d+)", named.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"[\w.]+", named.group(2)) if axis in sizes)
    return 2


class Module:
    """A program's optimised HLO.

    Args:
        arguments: names of the parameters ("model.norm.weight"), in order.

    Attributes:
        computations: by name.
        entry: the one that runs.
    """

    def __init__(self, text: str, arguments: Sequence[str] = ()) -> None:
        self.text = text
        self.arguments = arguments
        self.computations: dict[str, Computation] = {}
        self.entry = Computation("")
        at: Computation | None = None
        for line in text.splitlines():
            begins = _COMPUTATION.match(line)
            if begins and " = " not in line.split("(")[0]:
                at = self.computations[begins.group(2)] = Computation(begins.group(2))
                if begins.group(1):
                    self.entry = at
            elif line == "}":
                at = None
            elif at is not None:
                made = _instruction(line)
                if made is not None:
                    at.instructions[made.name] = made

    # -- what runs

    def running(self, computation: Computation | None = None, times: int = 1) -> Iterator[tuple[Computation,
                                                                                               Instruction, int]]:
        """Every instruction that is executed on its own, and how often (a loop whose number of turns the compiler does
        not know counts once)."""
        computation = self.entry if computation is None else computation
        for each in computation.instructions.values():
            if each.opcode in ("while", "conditional", "call"):
                turns = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', each.rest)
                for name in each.called() + _branches(each.rest):
                    yield from self.running(self.computations[name], times * (int(turns.group(1)) if turns else 1))
            elif each.opcode not in _FREE:
                yield computation, each, times

    def fusions(self) -> int:
        return sum(times for _, each, times in self.running() if each.opcode == "fusion")

    def cycles(self) -> int:
        """The compiler's own estimate, where it makes one."""
        return sum(times * int(found.group(1)) for _, each, times in self.running()
                   if (found := re.search(r'"estimated_cycles":"?(\d+)', each.rest)))

    def host_transfers(self) -> list[str]:
        """Instructions that move data between the chip and the host."""
        return [f"{each.opcode} {each.name}" for _, each, _ in self.running()
                if each.opcode in _HOST or any(shape.space == _HOST_SPACE for shape in each.shapes)]

    # -- memory

    def temporaries(self) -> list[Temporary]:
        """Values in HBM that are neither arguments, results, nor written in place, the largest first; alike ones of
        modules whose names differ in a number are one."""
        found: dict[tuple[str, str, str, tuple[int, ...], int], int] = {}
        results = set(self.entry.root().operands) | {self.entry.root().name}
        for computation, each, times in self.running():
            if each.opcode in _ARGUMENTS or each.opcode.endswith("-start") or self._in_place(each) or \
                    (computation is self.entry and each.name in results):
                continue
            module, operation = self.module_of(computation, each), named(each.rest)[1]
            for shape in each.shapes:
                if shape.space == 0:
                    key = (module, operation or each.opcode, shape.dtype, shape.sizes, shape.padded())
                    found[key] = found.get(key, 0) + times
        return sorted((Temporary(*key, times) for key, times in found.items()), key=lambda one: -one.nbytes)

    def module_of(self, computation: Computation, each: Instruction) -> str:
        """The module that computes an instruction (of a copy: what is copied), with * for numbers; "" for none."""
        module = named(each.rest)[0]
        while not module and each.opcode in _COPIES and each.operands:
            each = computation.instructions[each.operands[0]]
            module = named(each.rest)[0]
        if each.opcode == "parameter" and computation is self.entry and self.arguments:
            module = self.arguments[int(each.inside)].rpartition(".")[0]
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)

    def _in_place(self, each: Instruction) -> bool:
        if each.opcode != "fusion":
            return False
        part = self.computations[each.called()[0]]
        last = part.root()
        while last.opcode in ("bitcast", "convert", "reshape") and len(last.operands) == 1:
            last = part.instructions[last.operands[0]]
        return last.opcode == "dynamic-update-slice"

    # -- between chips

    def collectives(self) -> list[Collective]:
        """What chips exchange, each kind and size with how often it runs."""
        found: dict[tuple[str, int, int], int] = {}
        seen: set[str] = set()
        for _, each, times in self.running():
            for one in self._exchanges(each):
                # One that is woven into several fusions, to overlap with them, appears in each, on one channel.
                channel = re.search(r"channel_id=(\d+)", one.rest)
                if channel is not None and channel.group(1) in seen:
                    continue
                seen.update(channel.groups() if channel is not None else ())
                kind = one.opcode.removesuffix("-start")
                sizes = [shape.nbytes() for shape in one.shapes]
                whole = max(sizes) if one.opcode.endswith("-start") or kind == "all-gather" else sum(sizes)
                chips = _group(one.rest)
                if kind == "reduce-scatter":
                    whole *= chips
                found[kind, whole, chips] = found.get((kind, whole, chips), 0) + times
        return [Collective(kind, whole, chips, times) for (kind, whole, chips), times in found.items()]

    def _exchanges(self, each: Instruction) -> Iterator[Instruction]:
        """The collectives in an instruction: itself, or what a fusion or an asynchronous computation has inside."""
        if each.opcode.removesuffix("-start") in _COLLECTIVES:
            yield each
        elif each.opcode in ("fusion", "async-start", "custom-call"):
            for name in each.called():
                for inner in self.computations[name].instructions.values() if name in self.computations else ():
                    yield from self._exchanges(inner)

    # -- HBM

    def traffic(self) -> int:
        """Bytes between HBM and the chip: operands read from it and results written to it. Slices and gathers read
        what they take, updates in place write what they change."""
        return sum(times * self._moved(computation, each) for computation, each, times in self.running())

    def traffic_of_modules(self) -> dict[str, int]:
        """`traffic` by the modules that cause it, the most first."""
        found: dict[str, int] = {}
        for computation, each, times in self.running():
            module = self.module_of(computation, each)
            found[module] = found.get(module, 0) + times * self._moved(computation, each)
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def _moved(self, computation: Computation, each: Instruction) -> int:
        if each.opcode.endswith("-start"):
            return 0  # counted when it is done
        if each.opcode.endswith("-done"):
            start = computation.instructions[each.operands[0]]
            size = sum(shape.nbytes() for shape in each.shapes)
            source = sum(shape.nbytes() for name in start.operands for shape in computation.instructions[name].shapes
                         if shape.space == 0)
            return min(size, source) + sum(shape.nbytes() for shape in each.shapes if shape.space == 0)
        called = self.computations[each.called()[0]] if each.opcode == "fusion" else None
        read: dict[str, int] = {}  # an operand that is given twice is read once
        for number, name in enumerate(each.operands):
            source_ = computation.instructions[name]
            if len(source_.shapes) == 1 and source_.shapes[0].space == 0:
                whole = source_.shapes[0].nbytes()
                part = self._read(called, number, whole) if called is not None else _used(each, name, whole)
                read[name] = max(read.get(name, 0), part)
        written = self._written(called) if called is not None else _results(computation, each)
        return sum(read.values()) + sum(size for size, shape in zip(written, each.shapes) if shape.space == 0)

    def _read(self, computation: Computation, number: int, whole: int) -> int:
        """How much of a parameter a fusion reads."""
        total = 0
        waiting = [computation.parameter(number).name]
        while waiting:
            name = waiting.pop()
            for user in computation.users(name):
                if user.opcode in ("bitcast", "reshape", "transpose", "copy") and not user.root:
                    waiting.append(user.name)
                elif user.opcode == "fusion":
                    inner = self.computations[user.called()[0]]
                    total += sum(self._read(inner, at, whole) for at, given in enumerate(user.operands)
                                 if given == name)
                else:
                    total += _used(user, name, whole)
        return min(total, whole)

    def _written(self, computation: Computation) -> list[int]:
        root = computation.root()
        parts = [computation.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        sizes: list[int] = []
        for given in parts:
            part = given
            while part.opcode in ("bitcast", "convert", "reshape") and len(part.operands) == 1:
                part = computation.instructions[part.operands[0]]
            if part.opcode == "fusion":
                sizes += self._written(self.computations[part.called()[0]])
            else:
                sizes += _results(computation, part if part.opcode == "dynamic-update-slice" else given)
        return sizes


def _used(user: Instruction, name: str, whole: int) -> int:
    """How much of an operand an instruction reads."""
    if user.opcode in _SLICES and user.operands[0] == name:
        return sum(shape.nbytes() for shape in user.shapes)
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    return whole


def _results(computation: Computation, each: Instruction) -> list[int]:
    if each.opcode == "dynamic-update-slice":
        return [shape.nbytes() for shape in computation.instructions[each.operands[1]].shapes]
    return [shape.nbytes() for shape in each.shapes]


def _branches(rest: str) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", rest)
    return _OPERAND.findall(found.group(1)) if found else re.findall(
        r"(?:true|false)_computation=%?([\w.\-]+)", rest)


def _instruction(line: str) -> Instruction | None:
    begins = _INSTRUCTION.match(line)
    if begins is None:
        return None
    at = begins.end()
    end = _closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    opened = line.index("(", end)
    closed = _closing(line, opened)
    inside = line[opened + 1:closed]
    return Instruction(begins.group(2), line[end:opened].strip(), shapes(line[at:end]), _OPERAND.findall(inside),
                       line[closed + 1:], bool(begins.group(1)), inside)


def _closing(line: str, opened: int) -> int:
    depth = 0
    for found in re.compile(r"[()]").finditer(line, opened):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"HLO is not understood: {line.strip()[:200]}")
