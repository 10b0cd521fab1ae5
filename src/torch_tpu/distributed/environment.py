"""What the launching process exports for its workers, and what each worker derives for libtpu. No JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..runtime import platform

# Chips of one host along x, y, z by their number (Google's system architecture pages).
_BOUNDS: dict[str, dict[int, tuple[int, int, int]]] = {
    "v4": {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)},
    "v5p": {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)},
    "v5e": {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)},
    "v6e": {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)},
    "v7x": {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)},
}
PORT = 8476  # of the first process of a host; libtpu's own default


def set_tpu_launch_env(nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    """Prepares the environment of this process for `torch.distributed.run.main()` or multiprocessing. Plain `torchrun`
    works without it: what a worker needs is derived from torchrun's variables when its device starts.

    Sets, where they are not set: TORCH_TPU_HOSTS (the hosts of a TPU slice, by TPU_WORKER_HOSTNAMES), OMP_NUM_THREADS
    for virtual chips, which share this host's cores. Safe to call twice.

    Args:
        nnodes: hosts; from TPU_WORKER_HOSTNAMES when None.
        nproc_per_node: processes on each host, one a chip; all chips when None.

    Raises:
        ValueError: a number below one, or more processes than this host has chips.
    """
    for name, value in (("nnodes", nnodes), ("nproc_per_node", nproc_per_node)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    chosen = platform.choose()
    if chosen.virtual:
        if nproc_per_node is not None and nproc_per_node > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc_per_node)))
        return
    if chosen.chips is not None and nproc_per_node is not None:
        if nproc_per_node > chosen.chips:
            raise ValueError(f"nproc_per_node={nproc_per_node}, but this host has {chosen.chips} {chosen.generation} "
                             "chip(s): one process drives one chip")
        bounds(chosen.generation, nproc_per_node)
    hosts = hostnames()
    if nnodes is not None and nnodes > 1 and len(hosts) != nnodes:
        raise ValueError(f"nnodes={nnodes}, but TPU_WORKER_HOSTNAMES names {len(hosts)} host(s); set it to the "
                         "comma-separated hosts of the slice")
    if hosts:
        os.environ.setdefault("TORCH_TPU_HOSTS", ",".join(hosts))


def hostnames() -> list[str]:
    """The hosts of the slice as the cluster names them; empty on a single host."""
    given = os.environ.get("TORCH_TPU_HOSTS") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    return names if len(names) > 1 else []


def bounds(generation: str, chips: int) -> tuple[int, int, int]:
    """How the chips of one host lie.

    Raises:
        ValueError: a host of this generation cannot be cut into that many chips.
    """
    known = _BOUNDS.get(generation, _BOUNDS["v5e"])
    if chips not in known:
        raise ValueError(f"{chips} chip(s) of a {generation} host form no box; use {', '.join(map(str, known))}")
    return known[chips]


def worker_environment(rank: int, local_rank: int, world: int, per_host: int, generation: str,
                       hosts: Sequence[str] = ()) -> dict[str, str]:
    """What libtpu must find in one worker's environment: its own chip, and where the other processes of the slice are.

    Args:
        rank, world: the process and their number.
        local_rank, per_host: the same on this host.
        generation: "v4", "v5e", "v5p", "v6e" or "v7x".
        hosts: all hosts in order of rank; empty for a single one.
    """
    x, y, z = bounds(generation, per_host)
    number = max(1, world // per_host)
    names = list(hosts) or ["localhost"]
    if len(names) != number:
        raise ValueError(f"{world} processes with {per_host} a host need {number} host(s), got {', '.join(names)}")
    addresses = [f"{name}:{PORT + i}" for name in names for i in range(per_host)]
    return {
        "TPU_VISIBLE_CHIPS": str(local_rank),
        "TPU_VISIBLE_DEVICES": str(local_rank),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": f"{x},{y * number},{z}" if number > 1 else f"{x},{y},{z}",
        "TPU_PROCESS_ADDRESSES": ",".join(addresses),
        "TPU_PROCESS_PORT": str(PORT + local_rank),
        "CLOUD_TPU_TASK_ID": str(rank),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
