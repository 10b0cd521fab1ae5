"""Starts JAX once, on first use, and owns the process's chip. The user's JAX configuration is left alone."""

from __future__ import annotations

import os
import threading
import time
from . import config, platform


class Client:
    """The chip this process drives, through JAX."""

    def __init__(self) -> None:
        self.platform = platform.choose()
        if self.platform.virtual:
            # libtpu, where it is installed without a chip, would ask Google's metadata server for minutes.
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            if config.MALLOC.flag():
                _keep_large_blocks()
        import jax

        self.jax = jax
        try:
            devices = jax.local_devices(backend=self.platform.name)
        except RuntimeError as error:
            raise RuntimeError(
                f"the tpu device cannot start on platform {self.platform.name!r} ({self.platform.reason}): {error}. "
                "Set TORCH_TPU_PLATFORM=cpu for virtual chips, or run `torch-tpu doctor`.") from error
        self.devices = devices
        self.device = devices[0]

    def synchronize(self) -> None:
        """Returns when everything launched so far is computed."""
        for array in self.device.client.live_arrays():
            if not array.is_deleted():
                array.block_until_ready()


def _keep_large_blocks() -> None:
    """XLA:CPU's temporaries over 32 MB are otherwise mapped, faulted and unmapped at every call (4 times slower)."""
    import ctypes

    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, AttributeError):  # no glibc (macOS, musl): nothing to do
        return
    # M_ARENA_MAX=1, M_MMAP_MAX=0, M_TRIM_THRESHOLD=max, M_TOP_PAD=64 MiB
    for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1), (-2, 64 << 20)):
        mallopt(option, value)


_lock = threading.RLock()
_client: Client | None = None
started_in: float | None = None


def get() -> Client:
    """The process's client; starts JAX on the first call (about a second)."""
    global _client, started_in
    if _client is None:
        with _lock:
            if _client is None:
                begin = time.perf_counter()
                _client = Client()
                started_in = time.perf_counter() - begin
    return _client


def started() -> bool:
    return _client is not None
