"""What `torch-tpu check` says about models of well-known shapes on several TPU slices, beside arithmetic by hand: bytes
of weights and cache on a chip over its HBM bandwidth, or FLOPs over its peak. The models are the configurations in
benchmarks/configs; there are no weights. Time and memory are those of this machine.

    python benchmarks/aot_models.py [--model qwen3-0.6b ...] [--topology v5e-1,v5e-4] [--program decode prefill train]
                                    [--json FILE] [--write docs/aot.md]

`--write` replaces the tables of a page, between `<!-- aot_models -->` and `<!-- end of aot_models -->`; `--json` keeps
the reports, and takes from the file what is there already. Needs libtpu, no chip.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from torch_tpu.aot import topology

CONFIGS = Path(__file__).parent / "configs"
TOPOLOGIES = "v5e-1,v5e-4,v5e-8,v6e-1,v6e-4,v5p-4"
RUNS = [(model, kind) for kind in ("decode", "prefill") for model in ("qwen3-0.6b", "qwen3-8b", "glm-4-9b")]
RUNS.append(("qwen3-0.6b", "train"))
PROMPT, CACHE = 512, 1024
TITLES = {"decode": f"Decode, batch 1, a cache of {CACHE:,} tokens", "prefill": f"Prefill of {PROMPT} tokens",
          "train": f"A training step, AdamW, bfloat16, {PROMPT} tokens"}
BEGIN, END = "<!-- aot_models -->", "<!-- end of aot_models -->"


class Sizes:
    """Numbers of a model, by its configuration: parameters in products, in the table of embeddings, keys and values of
    a token."""

    def __init__(self, model: str) -> None:
        fields = json.loads((CONFIGS / model / "config.json").read_text())
        config: Any = AutoConfig.for_model(**fields)
        width, heads, grouped, head = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
                                       config.head_dim)
        self.layers, self.attended = config.num_hidden_layers, heads * head
        self.layer = width * head * (2 * heads + 2 * grouped) + 3 * width * config.intermediate_size
        self.table = width * config.vocab_size
        self.tied = config.tie_word_embeddings
        self.heads = grouped
        self.kept = 2 * self.layers * grouped * head  # numbers of a token in the cache

    def products(self) -> int:
        return self.layers * self.layer

    def parameters(self) -> int:
        return self.products() + self.table * (1 if self.tied else 2)


def by_hand(sizes: Sizes, kind: str, chips: topology.Slice) -> tuple[float, float]:
    """Bytes that stay on a chip, and seconds of a step: of HBM or of FLOPs, whichever is more."""
    count, chip = chips.devices, chips.chip
    cache = 2 * sizes.kept * CACHE / (count if sizes.heads % count == 0 else 1)
    held = 2 * sizes.parameters() / count
    if kind == "decode":  # each weight and the whole cache is read, of the table of embeddings one row
        read = 2 * (sizes.products() + sizes.table) / count + cache
        return held + cache, read / chip.bandwidth
    # Causality halves nothing here: scores of the whole prompt against the whole cache, as a static cache has them.
    scores = 4 * sizes.layers * sizes.attended * PROMPT * (CACHE if kind == "prefill" else PROMPT)
    if kind == "prefill":
        flops = 2 * sizes.products() * PROMPT + 2 * sizes.table + scores
        return held + cache, max(flops / count / chip.flops,
                                 (2 * (sizes.products() + sizes.table) / count + cache) / chip.bandwidth)
    flops = 3 * (2 * (sizes.products() + sizes.table) * PROMPT + scores)
    # Weights are read forward and backward and gradients written; AdamW reads and writes weights and two moments.
    moved = held * (2 + 1 + 1 + 3 + 3)
    return 3 * held, max(flops / count / chip.flops, moved / chip.bandwidth)


def check(model: str, kind: str, topologies: str) -> dict[str, Any]:
    """The reports of one call of `torch-tpu check`, its seconds of CPU time and in all, and bytes of memory: the peaks
    of its processes that lived at one time, added."""
    command = [sys.executable, "-m", "torch_tpu", "check", str(CONFIGS / model), "--topology", topologies, "--program",
               kind, "--prompt", str(PROMPT), "--cache", str(CACHE), "--json"]
    begin, peak, cpu = time.monotonic(), 0, _cpu()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        running = subprocess.Popen(command, stdout=out, stderr=err, text=True)
        while running.poll() is None:
            peak = max(peak, sum(_peak(pid) for pid in _tree(running.pid)))
            time.sleep(0.2)
            if time.monotonic() - begin > 3600:
                running.kill()
                raise TimeoutError(f"{' '.join(command)} takes more than an hour")
        out.seek(0)
        err.seek(0)
        said = out.read()
        if running.returncode not in (0, 1) or not said:
            raise RuntimeError(f"{' '.join(command)}: {err.read()}")
        return {"reports": json.loads(said), "seconds": time.monotonic() - begin, "cpu_s": _cpu() - cpu,
                "host_bytes": peak}


def _cpu() -> float:
    """Seconds that the CPUs have spent on processes of this one that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [each for child in task.read_text().split() for each in _tree(int(child))]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found


def _peak(pid: int) -> int:
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found.group(1)) * 1024 if found else 0


def table(kind: str, made: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"| {kind} | slice | fits | HBM, by hand | HBM | step, by hand | step, at least | ratio | bound | "
             "tokens/s, at most |", "|" + "---|" * 10]
    for model, run in made.items():
        sizes = Sizes(model)
        for each in run["reports"]:
            chips = topology.parse(each["topology"])
            held, step = by_hand(sizes, kind, chips)
            cells = [model, each["topology"], "yes" if each["fits"] else "**no**", f"{held / 2**30:.2f} GiB"]
            if each["step_s"] is None:
                cells += [f"more than {chips.chip.hbm / 2**30:.2f} GiB", f"{step * 1e3:.3f} ms", "", "", "", ""]
            else:
                cells += [f"{each['peak_bytes'] / 2**30:.2f} GiB", f"{step * 1e3:.3f} ms",
                          f"{each['step_s'] * 1e3:.3f} ms", f"{each['step_s'] / step:.2f}", each["bound"],
                          f"{each['tokens_s']:,.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(made: dict[str, dict[str, dict[str, Any]]]) -> str:
    parts = []
    for kind, runs in made.items():
        whole = "; ".join(f"{model} {run['cpu_s']:.0f} s ({run['seconds']:.0f} s in all) and "
                          f"{run['host_bytes'] / 2**30:.1f} GiB" for model, run in runs.items())
        parts.append(f"{TITLES[kind]}:\n\n" + "\n".join(table(kind, runs)) +
                     f"\n\nAll slices of a model in one call, CPU time and host memory: {whole}.")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=[each.name for each in CONFIGS.iterdir()])
    parser.add_argument("--topology", default=TOPOLOGIES)
    parser.add_argument("--program", nargs="+", default=["decode", "prefill", "train"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    made: dict[str, Any] = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    for model, kind in RUNS:
        if model in args.model and kind in args.program and model not in made.get(kind, {}):
            made.setdefault(kind, {})[model] = run = check(model, kind, args.topology)
            print(f"{model} {kind}: {run['cpu_s']:.0f} s of {run['seconds']:.0f} s, "
                  f"{run['host_bytes'] / 2**30:.1f} GiB", file=sys.stderr)
            if args.json is not None:
                args.json.write_text(json.dumps(made, indent=1))
    text = page(made)
    print(text)
    if args.write is not None:
        old = args.write.read_text()
        if BEGIN not in old or END not in old:
            raise ValueError(f"{args.write} has no {BEGIN} and {END}")
        before, after = old.split(BEGIN)[0], old.split(END)[1]
        args.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
