"""One elementwise operator on a small tensor: strict eager mode on tpu, eager JAX, and CPU PyTorch, in turn, medians.

    python benchmarks/eager_overhead.py [ROUNDS]
"""

import statistics
import sys
import time
from collections.abc import Callable

import jax.numpy as jnp
import torch


def microseconds(fn: Callable[[], object], calls: int = 300) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - begin) / calls * 1e6


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    host = torch.randn(64)
    chip = host.to("tpu")
    array = jnp.ones(64)
    target = torch.zeros(64, device="tpu")
    peers = {"tpu add": lambda: chip + chip, "tpu add scalar": lambda: chip + 1.5, "tpu mul_": lambda: target.mul_(1.0),
             "tpu view": lambda: chip.view(8, 8), "jax add": lambda: array + array,
             "jax add scalar": lambda: array + 1.5, "cpu add": lambda: host + host}
    figures: dict[str, list[float]] = {name: [] for name in peers}
    for fn in peers.values():
        microseconds(fn, 50)
    for _ in range(rounds):
        for name, fn in peers.items():
            figures[name].append(microseconds(fn))
    torch.tpu.synchronize()
    base = statistics.median(figures["jax add"])
    for name, values in figures.items():
        median = statistics.median(values)
        print(f"{name:15} {median:7.1f} us   {median / base:5.2f} of eager JAX's add")


if __name__ == "__main__":
    main()
