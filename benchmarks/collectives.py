"""Collectives of tpu tensors against gloo's on CPU tensors, in turn in one run: time of 4 KB, bandwidth of 16 MB.

    python benchmarks/collectives.py [RANKS ...]        # 2 and 4 when none is given

Every rank waits for each collective before the next one, as a training step that reads the result does. The figures are
medians of rounds that alternate between the two; a ratio above 1 means that tpu tensors take longer. `one program` is
the form without gloo's shortcut (TORCH_TPU_EAGER_COLLECTIVES=program), which is what TPU chips run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"4 KB": 1 << 10, "16 MB": 4 << 20}  # float32 elements that one rank holds
CALLS = {"4 KB": 100, "16 MB": 3}
ROUNDS = 7


def collectives(device: str, count: int) -> dict[str, Callable[[], Any]]:
    """The calls, over tensors of `count` elements (of the larger side, where the two sides differ)."""
    ranks = dist.get_world_size()
    whole = torch.ones(count, device=device)
    part = torch.ones(count // ranks, device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }


def seconds(call: Callable[[], Any], calls: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.tpu.synchronize()
    return (time.perf_counter() - begin) / calls


def measure() -> None:
    dist.init_process_group()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for label, count in SIZES.items():
        peers = {device: collectives(device, count) for device in ("cpu", "tpu")}
        for name in peers["cpu"]:
            times: dict[str, list[float]] = {"cpu": [], "tpu": []}
            for turn in range(ROUNDS + 1):
                for device, calls in peers.items():
                    took = seconds(calls[name], CALLS[label])
                    if turn:  # the first one compiles
                        times[device].append(took)
            gloo, tpu = (statistics.median(times[device]) * 1e3 for device in ("cpu", "tpu"))
            if rank == 0:
                print(f"| {ranks} | {label} | {name} | {gloo:.3f} | {tpu:.3f} | {tpu / gloo:.2f} |", flush=True)
    dist.destroy_process_group()


def main(ranks: list[int]) -> None:
    for form in ("gloo", "program"):
        print(f"\nTORCH_TPU_EAGER_COLLECTIVES={form}\n")
        print("| ranks | a rank's tensor | collective | gloo, CPU tensors, ms | tpu tensors, ms | ratio |\n"
              "|---|---|---|---|---|---|", flush=True)
        for number in ranks:
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                            f"--nproc-per-node={number}", __file__], check=True,
                           env={**os.environ, "TORCH_TPU_EAGER_COLLECTIVES": form, "OMP_NUM_THREADS": "1",
                                "OMP_WAIT_POLICY": "PASSIVE"})


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        measure()
    else:
        main([int(argument) for argument in sys.argv[1:]] or [2, 4])
