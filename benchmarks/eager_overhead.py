"""Small operators: strict and fused eager mode on tpu, eager JAX, and CPU PyTorch, in turn in one run, medians.

    python benchmarks/eager_overhead.py [ROUNDS]

The first table is one operator whose result is thrown away. The second is a chain of 100 operators whose last result
is read, which fused mode runs as one executable.
"""

import statistics
import sys
import time
from collections.abc import Callable

import jax.numpy as jnp
import torch

CHAIN = 100


def microseconds(fn: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - begin) / calls * 1e6


def medians(peers: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    figures: dict[str, list[float]] = {name: [] for name in peers}
    for fn in peers.values():
        microseconds(fn, calls)
    for _ in range(rounds):
        for name, fn in peers.items():
            figures[name].append(microseconds(fn, calls))
    return {name: statistics.median(values) for name, values in figures.items()}


def show(title: str, figures: dict[str, float], base: str) -> None:
    print(f"| {title} | us an operator | ratio to {base} |\n|---|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value:.1f} | {value / figures[base]:.2f} |")
    print()


def chain(start: object, step: object) -> object:
    value = start
    for _ in range(CHAIN // 2):
        value = value * step  # type: ignore[operator]
        value = value + step
    return value


def fused(fn: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        before = torch.tpu.set_eager_mode("fused")
        try:
            return fn()
        finally:
            torch.tpu.set_eager_mode(before)

    return run


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    host = torch.randn(64)
    chip = host.to("tpu")
    array = jnp.ones(64)
    target = torch.zeros(64, device="tpu")
    show("one operator", medians({
        "tpu add": lambda: chip + chip, "jax add": lambda: array + array, "cpu add": lambda: host + host,
        "tpu add number": lambda: chip + 1.5, "jax add number": lambda: array + 1.5,
        "tpu mul_": lambda: target.mul_(1.0),
        "tpu view": lambda: chip.view(8, 8), "cpu view": lambda: host.view(8, 8)}, rounds, 300), "jax add")
    torch.tpu.synchronize()
    figures = medians({
        "tpu strict": lambda: chain(chip, chip).cpu(), "tpu fused": fused(lambda: chain(chip, chip).cpu()),  # type: ignore
        "jax eager": lambda: chain(array, array).block_until_ready(), "cpu": lambda: chain(host, host)}, rounds, 20)  # type: ignore
    show(f"chain of {CHAIN}", {name: value / CHAIN for name, value in figures.items()}, "jax eager")


if __name__ == "__main__":
    main()
