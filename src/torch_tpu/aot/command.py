"""`torch-tpu check MODEL`: whether a model of Transformers fits on TPU chips and how fast it can be, without either."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

PROGRAMS = "prefill,decode"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder with config.json, a configuration class (Qwen3Config) or type (qwen3)")
    parser.add_argument("--topology", default="v5e-1,v6e-1", help="by commas: v5e-1, v5e-4, v5p-8, v6e-4, ...")
    parser.add_argument("--mesh", default="", help="for several chips: tp=4, or fsdp=2,tp=2; default: all chips are tp")
    parser.add_argument("--tp", type=_positive, metavar="N", help="short for --mesh tp=N")
    parser.add_argument("--batch", type=_positive, default=1, help="sequences")
    parser.add_argument("--prompt", type=_positive, default=512, help="tokens of prefill, and of a training example")
    parser.add_argument("--cache", type=_positive, default=1024, help="tokens that the static cache holds")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--program", default=PROGRAMS, help="by commas: prefill, decode, train")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change the configuration")
    parser.add_argument("--report", action="store_true", help="all that is known about each program")
    parser.add_argument("--price", nargs="?", const="", action="append", metavar="v5e=1.2",
                        help="what it costs, by list prices in US dollars a chip-hour, or by yours")
    parser.add_argument("--plot", metavar="FILE", help="a picture (.svg, .png) of memory and roofline")
    parser.add_argument("--json", action="store_true", help="the reports as JSON")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def run(given: argparse.Namespace) -> int:
    """0: everything fits; 1: something does not fit or cannot be compiled; 2: the question is not understood."""
    # No chip is used, also where there is one; and libtpu, which JAX would try to start here, is another process's.
    os.environ["TORCH_TPU_PLATFORM"] = os.environ["JAX_PLATFORMS"] = "cpu"
    import torch

    from ..runtime import errors
    from . import compiling, models, plot, prices, topology

    names = given.topology.split(",")
    shape = models.Shape(given.batch, given.prompt, given.cache)
    try:
        if given.tp and given.mesh:
            raise ValueError(f"--tp {given.tp} and --mesh {given.mesh}: give one of them; --tp N is --mesh tp=N")
        axes = {"tp": given.tp} if given.tp else _mesh(given.mesh)
        chips = [topology.parse(name) for name in names]
        meshes = [compiling.arranged(each, axes if each.devices > 1 else None) for each in chips]
        kinds = _kinds(given.program, models.PROGRAMS)
        if shape.prompt > shape.cache and set(kinds) != {"train"}:
            raise ValueError(f"the prompt of {shape.prompt} tokens is longer than the cache of {shape.cache}; give "
                             "--cache")
        model = models.model(models.config(given.model, _changes(given.set)), getattr(torch, given.dtype))
        compiling.need_libtpu()
        costs = prices.given(given.price) if given.price is not None else None
        picture = plot.need(given.plot) if given.plot else None
    except (ValueError, RuntimeError) as error:
        print(f"torch-tpu: {error}", file=sys.stderr)
        return 2
    found: list[Any] = []
    failed = 0
    parameters = sum(each.numel() for each in model.parameters())
    title = (f"{type(model).__name__}, {given.dtype}, {parameters / 1e9:.3g} G parameters; batch {shape.batch}, "
             f"prompt {shape.prompt}, cache {shape.cache}")
    if not given.json:
        print(f"{title}\n\n{'' if given.report else _HEADER}", flush=True)
    for kind in kinds:
        tokens = shape.batch * (1 if kind == "decode" else shape.prompt)
        programs: dict[str, Any] = {}
        for name, chip, mesh in zip(names, chips, meshes):
            try:
                if repr(mesh) not in programs:
                    programs[repr(mesh)] = models.program(model, kind, shape, mesh)
                program = programs[repr(mesh)]
            except (errors.CaptureError, ValueError) as error:
                print(f"torch-tpu: {kind} cannot be one program: {error}", file=sys.stderr)
                failed += 1
                continue
            try:
                made = compiling.compile_program(program, name, chip, tokens)
            except RuntimeError as error:
                print(f"torch-tpu: {error}", file=sys.stderr)
                failed += 1
                continue
            found.append(made.report)
            failed += not made.report.fits
            if given.report and not given.json:
                print(f"{made.report}\n", flush=True)
            elif not given.json:
                print(_row(kind, made.report), flush=True)
    if given.json:
        print(json.dumps([_as_json(each, costs) for each in found], indent=2))
    elif found:
        if not given.report:
            _advise(found)
        if costs is not None:
            print("\n" + "\n".join(prices.summary(found, costs)))
    if picture is not None and found:
        plot.draw(found, title, picture)
    return 1 if failed else 0


_HEADER = (f"{'program':<8}  {'topology':<8}  {'fits':<4}  {'HBM':>10}  {'of':>9}  {'step, at least':>14}  "
           f"{'bound':<7}  {'tokens/s, at most':>17}  {'compile':>8}")


def _row(kind: str, report: Any) -> str:
    from .report import seconds, size

    line = f"{kind:<8}  {report.topology:<8}  {'yes' if report.fits else 'NO':<4}  "
    if not report.fits:
        return line + report.problem
    rate = f"{report.tokens_s:,.0f}" if report.tokens_s is not None else "-"
    return (f"{line}{size(report.peak_bytes):>10}  {size(report.hbm):>9}  {seconds(report.step_s):>14}  "
            f"{report.bound:<7}  {rate:>17}  {report.trace_s + report.compile_s:>6.1f} s"
            + (f"  {len(report.host_transfers)} host transfers" if report.host_transfers else ""))


def _advise(reports: list[Any]) -> None:
    """What would make those fit that do not."""
    lines = [f"{each.name.rpartition(' ')[2]} on {each.topology}: {'; or '.join(each.advice)}"
             for each in reports if not each.fits]
    if lines:
        print("\nto make it fit\n" + "\n".join(f"  {line}" for line in lines))


def _as_json(report: Any, costs: dict[str, float] | None) -> dict[str, Any]:
    from . import prices

    found = dataclasses.asdict(report)
    if costs is not None:
        cost = prices.cost(report, costs)
        found.update(price_hour=cost.hour if cost else None, price_million_tokens=cost.million if cost else None)
    return found


def _mesh(text: str) -> dict[str, int] | None:
    found = {}
    for each in filter(None, text.split(",")):
        name, equals, value = each.partition("=")
        if not equals or not value.isdecimal():
            raise ValueError(f"--mesh {text}: give the axes and their sizes, as in fsdp=2,tp=2")
        found[name] = int(value)
    return found or None


def _kinds(text: str, known: tuple[str, ...]) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"program {kind!r} is not known; it is one of {', '.join(known)}")
    return kinds


def _changes(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"--set {each}: give FIELD=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
