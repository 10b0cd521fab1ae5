"""The process group for tpu tensors. Its collectives are XLA programs (program.py), or gloo's over the memory of
virtual chips (host_memory.py); CPU tensors, barriers and point-to-point transfers go through gloo (host.py)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from ..runtime import client
from . import host, options
from .exchanges import Exchanges


class TpuProcessGroup(Exchanges):
    """Collectives between the chips of several processes. See LaunchingGroup for the arguments."""

    def _get_backend(self, device: torch.device) -> Any:
        """gloo, for every device: it is what this group has of the kind c10d calls a backend."""
        return self.gloo

    def _get_backend_name(self) -> str:
        return "tpu_dist"

    def get_group_store(self) -> Any:
        return self.store

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def shutdown(self) -> None:
        self.host.shutdown()

    def abort(self) -> None:
        self.host.abort()

    def barrier(self, opts: Any = None) -> Any:
        client.synchronize()
        plain = options.barrier(self.timeout_of(opts))  # gloo would take the device named in the caller's for its own
        return host.watch(self, "barrier", lambda: self.host.barrier(plain), seconds=plain.timeout.total_seconds())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        client.synchronize()
        self.host.monitored_barrier(timeout or self.timeout, wait_all_ranks)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        return host.send(self, tensors, destination, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return host.receive(self, tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return host.receive(self, tensors, None, tag)
