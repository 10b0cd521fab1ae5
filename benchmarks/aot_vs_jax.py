"""Ours against a decoder written by hand in JAX (jax_decoder.py), both compiled by libtpu for chips that are not here:
the Qwen3 shape of inference.py in bfloat16, batch 1, prefill of 512 tokens and decode over a static cache of 1,024;
and a training step (AdamW) on 4 sequences of 512 tokens.
Prints a Markdown table of what the compiler and its program say, and of the ratios (ours over JAX's).

    python benchmarks/aot_vs_jax.py [--topology v5e-1 v6e-1] [--program decode prefill train] [--rows 8] [--hlo FOLDER]

`--rows`: ours with products of fewer rows padded to so many (TORCH_TPU_MATMUL_ROWS); JAX's rows are as they are. Needs
libtpu, no chip.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

# The programs are for other chips: this process starts none.
os.environ.update(TORCH_TPU_PLATFORM="cpu", JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1")

import jax
import jax.numpy as jnp
import jax_decoder
import torch
from transformers import Qwen3Config

from torch_tpu import aot
from torch_tpu.aot import models, tracing, weightless
from torch_tpu.lowering import context

CACHE, PROMPT, BATCH = 1024, 512, 4
FIGURES = ("flops", "hbm_traffic", "bytes_accessed", "temporary_bytes", "peak_bytes", "fusions", "cycles", "step_s")


def settings() -> Any:
    return Qwen3Config(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
                       head_dim=128, intermediate_size=3072, vocab_size=32768, tie_word_embeddings=True)


def ours(config: Any, tokens: int) -> tracing.Program:
    """The next token of the model of Transformers, as inference.py runs it."""
    model = models.model(config, torch.bfloat16)
    if tokens == BATCH * PROMPT:
        ids = weightless.tensor((BATCH, PROMPT), torch.int64)
        return aot.trace(model.train(), {"input_ids": ids, "labels": ids, "use_cache": False}, train=True, name="ours")
    cache = models.static_cache(model, models.Shape(cache=CACHE))

    def step(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        logits = model(input_ids=ids, position_ids=positions, cache=cache, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True), positions[:, -1:] + 1

    with torch.no_grad():
        return aot.trace(step, (model, *(weightless.tensor((1, tokens), torch.int64) for _ in range(2))), name="ours")


def theirs(config: Any, tokens: int) -> tracing.Program:
    """The functions of jax_decoder.py: the cache, or parameters and moments, donated."""
    def like(shape: Any, kind: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), kind)

    state = models.model(config, torch.bfloat16).state_dict()
    weights = {name: like(value.shape) for name, value in state.items() if name != "lm_head.weight"}
    count = like((), jnp.int32)
    if tokens == BATCH * PROMPT:
        step = functools.partial(jax_decoder.training_step, config)
        return lowered(step, (weights, weights, weights, count, like((BATCH, PROMPT), jnp.int32)), (0, 1, 2, 3))
    rows = like((config.num_key_value_heads, CACHE, config.head_dim))
    given = (weights, like((tokens,), jnp.int32), count, [(rows, rows)] * config.num_hidden_layers)
    return lowered(functools.partial(jax_decoder.forward, config), given, (3,))


def lowered(function: Any, given: tuple[Any, ...], donated: tuple[int, ...]) -> tracing.Program:
    step = jax.jit(function, donate_argnums=donated, keep_unused=True)
    module = step.trace(*given).lower(lowering_platforms=("tpu",)).as_text()
    arguments = [tracing.Argument(jax.tree_util.keystr(path), leaf.shape, leaf.dtype.name,
                                  leaf.size * leaf.dtype.itemsize, path[0].idx in donated)
                 for path, leaf in jax.tree_util.tree_leaves_with_path(given)]
    return tracing.Program("jax", module.encode(), tuple(arguments), 0.0)


def shown(name: str, value: Any) -> str:
    if name == "step_s":
        return f"{value * 1e3:.3f} ms"
    return f"{value / 1e6:,.2f} M" if name != "fusions" else f"{value:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="+", default=["v5e-1", "v6e-1"])
    parser.add_argument("--program", nargs="+", default=["decode", "prefill", "train"],
                        choices=["decode", "prefill", "train"])
    parser.add_argument("--rows", nargs="+", type=int, default=[8])
    parser.add_argument("--hlo", type=Path, help="a folder for the optimised HLO and the StableHLO")
    args = parser.parse_args()
    config = settings()
    print(f"| program | topology | peer | {' | '.join(FIGURES)} |\n|{'---|' * (3 + len(FIGURES))}", flush=True)
    for kind in args.program:
        tokens = {"decode": 1, "prefill": PROMPT, "train": BATCH * PROMPT}[kind]
        programs = {"jax": theirs(config, tokens)}
        for rows in args.rows:
            os.environ["TORCH_TPU_MATMUL_ROWS"] = str(rows)
            context._matmul_rows.cache_clear()
            programs[f"ours, rows {rows}"] = ours(config, tokens)
        for topology in args.topology:
            base = None
            for peer, program in programs.items():
                made = aot.compile_program(program, topology, tokens=tokens)
                if args.hlo is not None:
                    args.hlo.mkdir(parents=True, exist_ok=True)
                    stem = f"{kind}-{topology}-{peer.replace(', ', '-').replace(' ', '')}"
                    (args.hlo / f"{stem}.hlo.txt").write_text(made.hlo)
                    (args.hlo / f"{stem}.stablehlo.mlir").write_bytes(program.module)
                figures = {name: getattr(made.report, name) for name in FIGURES}
                base = base or figures
                cells = [shown(name, value) + (f" ({value / base[name]:.2f})" if peer != "jax" and base[name] else "")
                         for name, value in figures.items()]
                print(f"| {kind} | {topology} | {peer} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
