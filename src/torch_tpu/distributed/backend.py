"""Registers the process group with torch.distributed, without importing JAX."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

NAMES = ("tpu_dist", "tpu")


def _create(options: Any, backend_options: Any = None) -> torch.distributed.ProcessGroup:
    from ..runtime import processes
    from .group import TpuProcessGroup

    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        rank, world = options.group_rank, options.group_size
    timeout: timedelta = options.timeout
    if world > 1:
        processes.request(rank, world, options.store, min(timeout.total_seconds(), 600.0))
    return TpuProcessGroup(options.store, options.group_rank, options.group_size, ranks, timeout,
                           str(options.group_id))


def install() -> None:
    """Makes `tpu_dist` (the default for tpu tensors) and `tpu` known to torch.distributed."""
    if not torch.distributed.is_available():
        return
    backend = torch.distributed.Backend
    for name in NAMES:
        if name.upper() not in backend._plugins:
            backend.register_backend(name, _create, extended_api=True, devices=["tpu"])
