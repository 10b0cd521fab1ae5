"""Does memory grow? Training steps, then `generate` calls, all of changing content; memory is reported at intervals.

    python script/soak.py [--steps 1000] [--calls 1000] [--every 100]

The first fifth of each part, and at least eight calls, is warm-up. Exit code 1 when afterwards the process grows by
more than --rss-mib, live tensors by more than 64 KiB, or the number of their buffers or of programs at all.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

WARM = 0.2
BYTES = 64 << 10
LENGTHS = (3, 5, 9, 12)


def rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status names no VmRSS")


def training(compiled: bool) -> Callable[[int], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.LSTM(32, 32, batch_first=True)).to("tpu")
    head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64)).to("tpu")
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    forward = torch.compile(head, backend="tpu") if compiled else head

    def step(index: int) -> None:
        ids = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(index)).to("tpu")
        hidden, _ = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(forward(hidden).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if not loss.isfinite().item():
            raise RuntimeError(f"loss of step {index} is {loss.item()}")

    return step


def generation(static: bool) -> Callable[[int], None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0)).to("tpu")
    cache = {"cache_implementation": "static"} if static else {}

    def call(index: int) -> None:
        random, length = torch.Generator().manual_seed(index), LENGTHS[index % len(LENGTHS)]
        ids = torch.randint(2, 128, (1, length), generator=random).to("tpu")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, **cache)
        if out.shape != (1, length + 4):
            raise RuntimeError(f"call {index} gave {tuple(out.shape)}")

    return call


def soak(name: str, work: Callable[[int], None], count: int, every: int, rss_bound: int) -> bool:
    """Runs work(0), ..., work(count - 1); True when memory stayed within the bounds after the warm-up."""
    begin, warm, samples = time.perf_counter(), min(max(2 * len(LENGTHS), int(count * WARM)), count - 1), []
    print(f"{name}\n  {'calls':>6} {'s':>6} {'RSS MiB':>9} {'tpu KiB':>9} {'buffers':>8} {'programs':>8}")
    for index in range(1, count + 1):
        work(index)
        if index in (warm, count) or (index > warm and (index - warm) % every == 0):
            gc.collect()
            stats = torch.tpu.memory_stats()
            programs = torch.tpu.compiler.stats()
            samples.append((rss(), torch.tpu.memory_allocated(), stats["allocation.all.current"],
                            programs.compiled + programs.loaded))
            held, allocated, buffers, known = samples[-1]
            print(f"  {index:6} {time.perf_counter() - begin:6.1f} {held / 2**20:9.1f} {allocated / 1024:9.1f} "
                  f"{buffers:8} {known:8}", flush=True)
    first, last = samples[0], samples[-1]
    grown = [after - before for before, after in zip(first, last)]
    bad = [what for what, growth, bound in zip(("RSS", "device memory", "buffers", "programs"), grown,
                                               (rss_bound, BYTES, 0, 0)) if growth > bound]
    print(f"  growth after {warm}: RSS {grown[0] / 2**20:+.1f} MiB, tpu {grown[1] / 1024:+.1f} KiB, "
          f"{grown[2]:+} buffers, {grown[3]:+} programs: {'GREW: ' + ', '.join(bad) if bad else 'steady'}")
    return not bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="training steps, half of them through torch.compile")
    parser.add_argument("--calls", type=int, default=1000, help="generate calls, half of them with the static cache")
    parser.add_argument("--every", type=int, default=100, help="calls between two reports")
    parser.add_argument("--rss-mib", type=float, default=16, help="growth of the process allowed after warm-up, MiB")
    args = parser.parse_args()
    bound = int(args.rss_mib * 2**20)
    parts = [("training, eager", lambda: training(False), args.steps // 2),
             ("training, compiled", lambda: training(True), args.steps - args.steps // 2),
             ("generate, dynamic cache, eager", lambda: generation(False), args.calls // 2),
             ("generate, static cache, compiled", lambda: generation(True), args.calls - args.calls // 2)]
    steady = [soak(name, make(), count, args.every, bound) for name, make, count in parts if count > 0]
    return 0 if all(steady) else 1


if __name__ == "__main__":
    raise SystemExit(main())
