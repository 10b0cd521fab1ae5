"""What is known about a program for a TPU: as an object, as text, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from . import fitting, hlo, overflow
from .topology import Slice
from .tracing import Argument, Program

_LARGEST = 8  # buffers listed


@dataclass(frozen=True)
class Report:
    """Bytes and seconds, unless a name says otherwise; of one chip, where there are several.

    Attributes:
        fits: whether the compiler found room for it in the chip's HBM.
        problem: why not.
        lacking: the memory that is too small: "HBM", "scoped VMEM" or "SMEM" (of a Pallas kernel), "VMEM".
        advice: what would make it fit.
        hbm: what programs may use of the chip's HBM.
        argument_bytes: parameters, caches and inputs, in whole tiles where the program was compiled.
        output_bytes: results, with those that are written in place (alias_bytes).
        temporary_bytes: what the program needs besides.
        parts: bytes of the arguments by what they are (fitting.PARTS), without padding.
        peak_bytes: arguments, results that are not in place, temporaries and code; None where it was not compiled.
        flops: floating point operations of one call.
        hbm_traffic: bytes read from HBM and written to it in one call, counted in the optimised program.
        bytes_accessed: XLA's count, which has prefetches and data that stay on the chip in it.
        step_s: the least time of a call by the chip's rates: `flops` at its peak in bfloat16, or `hbm_traffic` at its
            bandwidth, or `exchanged_bytes` at that of its links, whichever is most; float32 products take several
            times the first, and a collective has a latency that is not in it.
        bound: which of them: "compute", "HBM" or "interconnect".
        mesh: the axes of several chips.
        collectives: what the chips exchange, the most first.
        exchanged_bytes: what one chip sends for it.
        tokens_s: tokens a call, over step_s.
        cycles: sum of the compiler's estimates, of the instructions that have one.
        fusions: kernels that the program launches.
        host_transfers: instructions that move data to or from the host.
        padding_bytes: what whole tiles add to the arguments and results.
        padded: the arguments that grow most by it.
        largest: the largest arguments.
        temporaries: the largest, with the modules that compute them.
        traffic_of: `hbm_traffic` by modules, the most first; "" is what belongs to none, such as an optimizer.
        trace_s: seconds of capture and lowering.
        compile_s: seconds of the compiler.
        compiler_bytes: the most host memory that its process had.
    """

    name: str
    topology: str
    fits: bool
    problem: str
    hbm: int
    argument_bytes: int
    trace_s: float
    compile_s: float
    largest: tuple[Argument, ...]
    parts: dict[str, int]
    compiler_bytes: int
    lacking: str = ""
    advice: tuple[str, ...] = ()
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temporary_bytes: int | None = None
    code_bytes: int | None = None
    peak_bytes: int | None = None
    flops: float | None = None
    hbm_traffic: int | None = None
    bytes_accessed: float | None = None
    step_s: float | None = None
    bound: str = ""
    tokens: int | None = None
    tokens_s: float | None = None
    cycles: int | None = None
    fusions: int | None = None
    host_transfers: tuple[str, ...] = ()
    padding_bytes: int | None = None
    padded: tuple[tuple[str, int], ...] = field(default=())
    mesh: dict[str, int] = field(default_factory=dict)
    temporaries: tuple[hlo.Temporary, ...] = ()
    traffic_of: dict[str, int] = field(default_factory=dict)
    collectives: tuple[hlo.Collective, ...] = ()
    exchanged_bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n".join(f"{name:<16}{value}" for name, value in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        axes = ", ".join(f"{name}={count}" for name, count in self.mesh.items())
        lines = [("program", f"{self.name} on {self.topology}" + (f" ({axes}), of one chip:" if axes else "")),
                 ("fits", f"yes, {size(self.peak_bytes)} of {size(self.hbm)} HBM" if self.fits else
                  f"NO: {self.problem}"),
                 ("arguments", size(self.argument_bytes) + ": " + ", ".join(
                     f"{name} {size(nbytes)}" for name, nbytes in self.parts.items()))]
        if self.fits:
            lines += [("results", f"{size(self.output_bytes)}, of which {size(self.alias_bytes)} in place"),
                      ("temporaries", size(self.temporary_bytes) + _joined(
                          f"{_many(each.times)}{each.dtype}{list(each.sizes)} {size(each.nbytes)} "
                          f"{each.module or 'outside of modules'} ({each.operation})"
                          for each in self.temporaries[:4] if each.nbytes >= 2**16)),
                      ("FLOPs", f"{self.flops:.4g}"),
                      ("HBM traffic", f"{size(self.hbm_traffic)} (XLA's \"bytes accessed\": "
                                      f"{size(self.bytes_accessed)})" + _joined(
                                          f"{name or 'outside of modules'} {size(nbytes)}"
                                          for name, nbytes in list(self.traffic_of.items())[:4] if nbytes >= 2**16)),
                      ("step", f"at least {seconds(self.step_s)}, bound by {self.bound}"
                       + (f"; at most {self.tokens_s:,.0f} tokens/s" if self.tokens_s is not None else "")),
                      ("kernels", f"{self.fusions:,} fusions, estimated at {self.cycles:,} cycles"),
                      ("padding", size(self.padding_bytes) + _joined(
                          f"{name} +{size(extra)}" for name, extra in self.padded)),
                      *([("exchanged", f"{size(self.exchanged_bytes)} sent by each chip: " + "; ".join(
                          f"{each.times} {each.kind} of {size(each.nbytes)} on {each.chips}"
                          for each in self.collectives[:4]))] if self.collectives else []),
                      ("host transfers", ", ".join(self.host_transfers) or "none")]
        else:
            lines.append(("to make it fit", "; or ".join(self.advice)))
        lines += [("largest", "; ".join(f"{each.name} {each.dtype}{list(each.shape)} {size(each.nbytes)}"
                                        for each in self.largest[:4])),
                  ("compile time", f"trace {self.trace_s:.1f} s, libtpu {self.compile_s:.1f} s with "
                                   f"{size(self.compiler_bytes)} of host memory")]
        return lines


def make(program: Program, topology: str, chips: Slice, answer: dict[str, Any], text: str,
         tokens: int | None) -> Report:
    """The report of a compilation.

    Args:
        answer: what libtpu_door says.
        text: the optimised HLO; empty where the compiler found no room.
    """
    chip = chips.chip
    arguments = sorted(program.arguments, key=lambda each: -each.nbytes)
    common: dict[str, Any] = dict(name=program.name, topology=topology, hbm=chip.hbm, trace_s=program.trace_s,
                                  compile_s=answer["compile_s"], largest=tuple(arguments[:_LARGEST]), tokens=tokens,
                                  mesh=dict(program.axes), parts=fitting.parts(arguments),
                                  compiler_bytes=answer["host_bytes"])

    def lacking(found: overflow.Overflow) -> dict[str, Any]:
        wide = sum(each.nbytes for each in arguments if each.dtype == "float32" and fitting.part(each) == "weights") \
            > common["parts"].get("weights", 0) / 2
        return dict(fits=False, problem=found.problem, lacking=found.memory,
                    advice=fitting.advice(common["parts"], found, chips, wide))

    if not text:
        return Report(argument_bytes=sum(each.nbytes for each in arguments),
                      **lacking(overflow.understood(answer["error"])), **common)
    module = hlo.Module(text, [each.name for each in program.arguments])
    traffic = module.traffic()
    compute_s, memory_s = answer["flops"] / chip.flops, traffic / chip.bandwidth
    exchanged = tuple(sorted(module.collectives(), key=lambda each: -each.sent()))
    wire_s = sum(each.sent() for each in exchanged) / chip.interconnect
    step_s = max(compute_s, memory_s, wire_s)
    peak = answer["argument"] + answer["output"] - answer["alias"] + answer["temp"] + answer["generated_code"]
    grown = [(each.name, shape.padded() - shape.nbytes())
             for each, shape in zip(program.arguments, _parameters(module), strict=True)]
    results = sum(shape.padded() - shape.nbytes() for shape in module.entry.root().shapes)
    worst = sorted(((name, extra) for name, extra in grown if extra >= 2**20), key=lambda pair: -pair[1])
    fits = {"fits": True, "problem": ""} if peak <= chip.hbm else lacking(overflow.hbm(peak, chip.hbm))
    return Report(
        argument_bytes=answer["argument"], output_bytes=answer["output"], alias_bytes=answer["alias"],
        temporary_bytes=answer["temp"], code_bytes=answer["generated_code"], peak_bytes=peak, flops=answer["flops"],
        hbm_traffic=traffic, bytes_accessed=answer["bytes_accessed"], step_s=step_s,
        bound="compute" if compute_s == step_s else "HBM" if memory_s == step_s else "interconnect",
        collectives=exchanged, exchanged_bytes=round(sum(each.sent() for each in exchanged)),
        tokens_s=tokens / step_s if tokens is not None and step_s else None, cycles=module.cycles(),
        fusions=module.fusions(), host_transfers=tuple(module.host_transfers()),
        temporaries=tuple(module.temporaries()[:_LARGEST]),
        traffic_of=dict(list(module.traffic_of_modules().items())[:_LARGEST]),
        padding_bytes=sum(extra for _, extra in grown) + results, padded=tuple(worst[:3]), **fits, **common)


def _parameters(module: hlo.Module) -> list[hlo.Shape]:
    found = [each for each in module.entry.instructions.values() if each.opcode == "parameter"]
    return [each.shapes[0] for each in sorted(found, key=lambda each: int(each.inside))]


def _joined(parts: Iterable[str]) -> str:
    text = "; ".join(parts)
    return f": {text}" if text else ""


def _many(times: int) -> str:
    return f"{times} x " if times > 1 else ""


def size(value: float | None) -> str:
    """Bytes, readable."""
    if value is None:
        return "-"
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= step:
            return f"{value / step:,.2f} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:,.3f} ms" if value >= 1e-3 else f"{value * 1e6:,.1f} us"
