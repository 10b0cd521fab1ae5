"""Starts JAX once, on first use, and owns the process's chip. The user's JAX configuration is left alone."""

from __future__ import annotations

import atexit
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
        from . import processes, slices

        job = processes.wanted()
        if job is not None and self.platform.name == "tpu":
            slices.export(job.rank, job.world, self.platform.generation)
        import jax

        from . import jax_door

        if self.platform.virtual and not platform.scan_chips()[1]:
            jax_door.without_chips()
        if job is not None:
            processes.join(job)
        elif self.platform.virtual and (self.platform.chips or 1) > 1:
            jax_door.virtual_chips(self.platform.chips or 1)
        jax_door.quiet_fork()
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

    def idle(self) -> bool:
        """Whether everything launched so far is computed."""
        return all(array.is_deleted() or array.is_ready() for array in self.device.client.live_arrays())


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


def trim() -> None:
    """Virtual chips: gives memory that glibc keeps for later allocations back to the system."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # no glibc
        return


_lock = threading.RLock()
_client: Client | None = None
started_in: float | None = None
forked = False  # this process was forked from one that had started JAX, whose threads it lacks


def _after_fork() -> None:
    global _client, _lock, forked
    forked = forked or _client is not None
    _client = None
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def fork_error() -> RuntimeError:
    return RuntimeError(
        "the tpu device cannot be used in a process that was forked after its parent had started the device (a fork "
        "copies none of XLA's threads, so the first operation would wait for ever). Start the process with "
        "multiprocessing's 'spawn' method (torch.multiprocessing.set_start_method('spawn')), or keep device work in "
        "the parent: DataLoader workers should return CPU tensors.")


def get() -> Client:
    """The process's client; starts JAX on the first call (about a second)."""
    global _client, started_in
    if _client is None:
        if forked:
            raise fork_error()
        with _lock:
            if _client is None:
                begin = time.perf_counter()
                _client = Client()
                # XLA's threads must not be at work when the interpreter takes the process down: it would abort.
                atexit.register(synchronize_at_exit)
                started_in = time.perf_counter() - begin
    return _client


def started() -> bool:
    return _client is not None


def synchronize_at_exit() -> None:
    if _client is not None:
        _client.synchronize()


def synchronize() -> None:
    """Waits for everything launched so far; nothing was launched where JAX was not started."""
    if forked:
        raise fork_error()
    if _client is not None:
        _client.synchronize()


def idle() -> bool:
    """Whether everything launched so far is computed."""
    return _client is None or _client.idle()
