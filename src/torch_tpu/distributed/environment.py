"""What the launching process exports for its workers. No JAX."""

from __future__ import annotations

import os

from ..runtime import platform
from ..runtime.slices import bounds, hostnames


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
