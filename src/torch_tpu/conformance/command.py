"""`torch-tpu conformance`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from . import database


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", metavar="REGEX", help="only operators whose OpInfo name this matches (default: all)")
    parser.add_argument("--dtype", default=",".join(database.FIRST), metavar="A,B",
                        help="dtypes, or 'all' (%(default)s; all: " + ",".join(database.DTYPES) + ")")
    parser.add_argument("--samples", type=int, default=6, help="at most this many an operator and dtype (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds one operator may take (%(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE",
                        help="keep results in this JSON file, and add to what it holds")
    parser.add_argument("--again", choices=("missing", "failed"),
                        help="with --results: only operators that it lacks, or in which something failed")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the page (Markdown) here")
    parser.add_argument("--verbose", action="store_true", help="a line an operator")


def run(given: argparse.Namespace) -> int:
    """0 when every difference has a known reason, 1 otherwise, 2 for arguments that make no sense."""
    import torch

    from . import pool, report

    warnings.simplefilter("ignore")
    dtypes = database.DTYPES if given.dtype == "all" else tuple(given.dtype.split(","))
    wrong = [name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]
    if wrong:
        print(f"torch-tpu conformance: no dtype of torch: {', '.join(wrong)}", file=sys.stderr)
        return 2
    try:
        operators = database.operators()
    except ImportError as error:
        print(f"torch-tpu conformance: {error}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    if given.results is not None and given.results.exists():
        results = json.loads(given.results.read_text())
    todo = [i for i, op in enumerate(operators)
            if (given.op is None or re.search(given.op, op.full_name)) and _wanted(op, results, dtypes, given.again)]
    if not todo and not results:
        print("torch-tpu conformance: no operator matches", file=sys.stderr)
        return 2
    touched: set[str] = set()

    def done(number: int, answers: list[dict[str, Any]]) -> None:
        name = operators[number].full_name
        touched.add(name)
        entry = results.setdefault(name, {"lowered": False, "dtypes": {}})
        entry["dtypes"].pop("-", None)
        for answer in answers:
            if "operator" in answer:
                entry["lowered"] = answer["lowered"]
            else:
                entry["dtypes"][answer["dtype"]] = answer
        if given.results is not None:
            given.results.write_text(json.dumps(results))
        if given.verbose:
            counts = [f"{a['dtype']} {sum(a['passed'].values())}/{sum(a['total'].values())}" for a in answers[1:]]
            print(f"[{len(touched)}/{len(todo)}] {name}: {', '.join(counts)}", flush=True)

    pool.run(todo, dtypes, given.samples, given.jobs, given.timeout, done)
    if given.report is not None:
        kinds = " --dtype all" if given.dtype == "all" else ""
        command = f"torch-tpu conformance{kinds} --report {given.report}"
        given.report.write_text(report.page(results, _versions(), given.samples, command))
    seen = results if given.results is not None else {name: results[name] for name in touched}
    print("\n".join(report.summary(seen)))
    failures = report.unexplained(seen)
    if failures:
        print(f"\n{len(failures)} samples differ without a known reason:", *failures, sep="\n- ")
    return 1 if failures else 0


def _wanted(op: Any, results: dict[str, Any], dtypes: tuple[str, ...], again: str | None) -> bool:
    if again is None:
        return True
    import torch

    entry = results.get(op.full_name)
    if entry is None or any(getattr(torch, d) in op.dtypes and d not in entry["dtypes"] for d in dtypes):
        return True
    return again == "failed" and any(answer["failures"] for answer in entry["dtypes"].values())


def _versions() -> str:
    import jax
    import torch

    device = torch.tpu.get_device_properties(0)  # type: ignore[attr-defined]
    return f"torch {torch.__version__.split('+')[0]}, jax {jax.__version__}, {device.name}"
