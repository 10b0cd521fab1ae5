"""What the launching process exports for its workers. No JAX."""

from __future__ import annotations

import os

from ..runtime import platform, slices

MASTER_PORT = 29500  # torchrun's default


def set_tpu_launch_env(nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    """Prepares the environment of this process for `torch.distributed.run.main()` or multiprocessing. Plain `torchrun`
    works without it: what a worker needs is derived from torchrun's variables when its device starts.

    Sets, where they are not set: on several hosts what torchrun takes for its options (PET_NNODES, PET_NODE_RANK,
    PET_MASTER_ADDR, PET_MASTER_PORT) and TORCH_TPU_HOSTS; PET_NPROC_PER_NODE for a number that is given;
    OMP_NUM_THREADS for virtual chips, which share this host's cores. Options on torchrun's command line come first.
    Safe to call twice.

    Args:
        nnodes: hosts; when None, those of TPU_WORKER_HOSTNAMES (GKE, Cloud TPU), or one. With several, this host's
            number is TPU_WORKER_ID, JOB_COMPLETION_INDEX or NODE_RANK, or the place of its name among them.
        nproc_per_node: processes on each host, one a chip.

    Raises:
        ValueError: a number below one, more processes than this host has chips, a number that forms no box of chips,
            or hosts that are not known.
    """
    for name, value in (("nnodes", nnodes), ("nproc_per_node", nproc_per_node)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    chosen = platform.choose()
    if nproc_per_node is not None:
        if not chosen.virtual and chosen.chips is not None:
            chips = len(slices.visible_chips() or range(chosen.chips))
            if nproc_per_node > chips:
                raise ValueError(f"nproc_per_node={nproc_per_node}, but this host has {chips} {chosen.generation} "
                                 "chip(s) for this job: one process drives one chip")
            slices.bounds(chosen.generation, nproc_per_node)
        os.environ.setdefault("PET_NPROC_PER_NODE", str(nproc_per_node))
        if chosen.virtual and nproc_per_node > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc_per_node)))
    hosts = [] if nnodes == 1 else slices.hostnames()
    if nnodes is not None and nnodes > 1 and len(hosts) != nnodes:
        raise ValueError(f"nnodes={nnodes}, but TPU_WORKER_HOSTNAMES names {len(hosts)} host(s); set it to the "
                         "comma-separated hosts of the slice, the first one being that of rank 0")
    if hosts:
        for name, text in (("TORCH_TPU_HOSTS", ",".join(hosts)), ("PET_NNODES", str(len(hosts))),
                           ("PET_NODE_RANK", str(slices.host_number(hosts))), ("PET_MASTER_ADDR", hosts[0]),
                           ("PET_MASTER_PORT", os.environ.get("MASTER_PORT", str(MASTER_PORT)))):
            os.environ.setdefault(name, text)
