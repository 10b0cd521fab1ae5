"""A picture of reports: memory against each chip's HBM, and each program in its chip's roofline (matplotlib)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from . import fitting, prices
from .report import Report
from .topology import parse

_COLOURS = {"weights": "#4c72b0", "keys and values": "#dd8452", "optimizer state": "#8172b3", "inputs": "#937860",
            "temporaries and results": "#55a868", "what does not fit": "#c44e52"}
_MARKS = "os^Dv*PX"


def need(path: str) -> Path:
    """Where a picture can be written.

    Raises:
        ValueError: matplotlib is not installed, the folder is not there, or the name does not end in .svg or .png.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'torch_tpu[plot]'")
    found = Path(path)
    if found.suffix not in (".svg", ".png"):
        raise ValueError(f"--plot {path}: the name must end in .svg or .png")
    if not found.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {found.absolute().parent}")
    return found


def draw(reports: Sequence[Report], title: str, path: Path) -> None:
    """Writes the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, max(3.5, 1.5 + 0.38 * len(reports))), layout="constrained")
    memory, roof = figure.subplots(1, 2)
    figure.suptitle(title)
    _memory(memory, reports)
    _roofline(roof, [each for each in reports if each.step_s is not None])
    figure.savefig(path)


def _memory(axes, reports):  # type: ignore[no-untyped-def]
    unit = 2**30
    for row, report in enumerate(reports):
        parts = dict(report.parts)
        if report.peak_bytes is not None:
            parts["temporaries and results"] = max(0, report.peak_bytes - sum(parts.values()))
        left = 0.0
        for name in (*fitting.PARTS, "temporaries and results"):
            width = parts.get(name, 0) / unit
            axes.barh(row, width, left=left, color=_COLOURS[name], height=0.7)
            left += width
        axes.plot([report.hbm / unit] * 2, [row - 0.45, row + 0.45], color="black", linewidth=2)
        axes.annotate(f" {left:,.2f} GiB" + ("" if report.fits else f", does not fit ({report.lacking or 'memory'})"),
                      (max(left, report.hbm / unit if left > 0.7 * report.hbm / unit else left), row), va="center",
                      fontsize=8, color="black" if report.fits else _COLOURS["what does not fit"])
    axes.set_yticks(range(len(reports)), [f"{prices.kind(each)} {each.topology}" for each in reports])
    axes.invert_yaxis()
    most = max(max(sum(each.parts.values()), each.peak_bytes or 0, each.hbm) for each in reports)
    axes.set_xlim(0, 1.35 * most / unit)
    axes.set_xlabel("GiB of one chip; the black line is its HBM")
    used = [name for name in _COLOURS if name == "temporaries and results" or any(name in r.parts for r in reports)]
    axes.legend([axes.barh(0, 0, color=_COLOURS[name]) for name in used], used, fontsize=8, loc="lower right")


def _roofline(axes, reports):  # type: ignore[no-untyped-def]
    if not reports:
        axes.set_axis_off()
        return
    chips = {each.topology: parse(each.topology).chip for each in reports}
    intensities = [each.flops / each.hbm_traffic for each in reports if each.flops and each.hbm_traffic]
    low, high = min([0.5, *intensities]) / 2, max([2000.0, *intensities]) * 2
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(chip.name for chip in chips.values()))}
    for name, colour in colours.items():
        chip = next(each for each in chips.values() if each.name == name)
        ridge = chip.flops / chip.bandwidth
        axes.plot([low, ridge, high], [low * chip.bandwidth, chip.flops, chip.flops], color=colour, label=name)
    programs = list(dict.fromkeys(map(prices.kind, reports)))
    for number, program in enumerate(programs):
        axes.plot([], [], _MARKS[number % len(_MARKS)], color="black", label=program)
    for each in reports:
        if each.flops and each.hbm_traffic and each.step_s:
            mark = _MARKS[programs.index(prices.kind(each)) % len(_MARKS)]
            axes.plot(each.flops / each.hbm_traffic, each.flops / each.step_s, mark,
                      color=colours[chips[each.topology].name])
            axes.annotate(f" {each.topology}", (each.flops / each.hbm_traffic, each.flops / each.step_s), fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs for a byte of HBM traffic")
    axes.set_ylabel("FLOP/s of one chip, at most")
    axes.legend(fontsize=8)
    axes.grid(True, which="both", linewidth=0.3)
