"""Several processes, one chip each: joins them in JAX's distributed runtime before JAX starts.

The processes are found by what torchrun exports (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or by the store of the
process group that is being made. Rank 0 starts the process that serves JAX's coordinator (coordinator.py), and tells
the others its port.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Job:
    """The processes of a job.

    Attributes:
        rank, world: this process's number, and how many there are.
        store: a torch.distributed store that all of them share.
        master: the host where rank 0 runs; loopback where all run on one host.
        seconds: how long to wait for the others.
    """

    rank: int
    world: int
    store: Any
    master: str
    seconds: float


_requested: Job | None = None
# JAX's client, the connection that says this process lives, and (rank 0 only) the coordinator's process: kept alive.
_runtime: tuple[Any, ...] | None = None
joined: Job | None = None
gone: dict[int, str] = {}  # ranks that are no more: "left", "failed" (with an error) or "died"
on_leave: list[Callable[[int, str], None]] = []  # called from a thread of their own


def request(rank: int, world: int, store: Any, seconds: float) -> None:
    """A process group of several processes is being made: JAX must start as part of that job."""
    global _requested
    if joined is None and _requested is None:
        _requested = Job(rank, world, store, _master(world), seconds)


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(os.environ.get(name) for name in names) and int(os.environ["WORLD_SIZE"]) > 1


def _master(world: int) -> str:
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    one_host = address in _LOOPBACK or os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    return "127.0.0.1" if one_host else address


def _from_environment() -> Job:
    from torch.distributed import rendezvous

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds = 300.0
    store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=timedelta(seconds=seconds))))
    return Job(rank, world, store, _master(world), seconds)


def wanted() -> Job | None:
    """The job that JAX should join when it starts; None for a process on its own."""
    if _requested is not None:
        return _requested
    return _from_environment() if launched() else None


def _own_address(master: str) -> str:
    """This host's address on the way to the master."""
    if master == "127.0.0.1":
        return master
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        return probe.getsockname()[0]


def own_address() -> str | None:
    """This host's address on the way to the host of rank 0; None where the job is on one host or there is none."""
    job = joined or _requested
    return None if job is None or job.master == "127.0.0.1" else _own_address(job.master)


def _wait(store: Any, keys: dict[int, str], seconds: float, doing: str) -> None:
    try:
        store.wait(list(keys.values()), timedelta(seconds=seconds))
    except RuntimeError as error:  # DistStoreError
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        raise RuntimeError(
            f"tpu: {doing}: rank(s) {', '.join(map(str, missing))} did not arrive within {seconds:g} s. Every process "
            "of the job must use the tpu device or make the process group; look at the first error of those ranks."
        ) from error


def join(job: Job) -> None:
    """Connects this process to the job (once, before JAX's backends start)."""
    global _runtime, joined
    import torch.distributed as dist

    from . import jax_door

    if jax_door.backends_started():
        raise RuntimeError(
            "tpu: JAX was started in this process before the process group was made, so this process cannot join the "
            "others any more. Call torch.distributed.init_process_group before the first use of the tpu device (or of "
            "JAX), or start the script with torchrun, which lets the device join at its first use.")
    store = dist.PrefixStore(f"torch_tpu/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", job.store)
    store.set(f"here/{job.rank}", b"1")
    _wait(store, {rank: f"here/{rank}" for rank in range(job.world)}, job.seconds, "starting the job")
    process = None
    if job.rank == 0:
        process, ports = _serve(job)
        store.set("coordinator", f"{job.master} {ports}".encode())
    _wait(store, {0: "coordinator"}, job.seconds, "looking for JAX's coordinator")
    host, port, door = store.get("coordinator").decode().split()
    alive = socket.create_connection((host, int(door)), timeout=job.seconds)
    alive.settimeout(None)
    alive.sendall(job.rank.to_bytes(4, "big"))
    client = jax_door.connect(f"{host}:{port}", job.rank, job.world, int(job.seconds), _own_address(job.master))
    _runtime = (client, alive, process)
    joined = job
    atexit.register(_leave, alive)
    threading.Thread(target=_listen, args=(alive,), name="torch_tpu ranks", daemon=True).start()


def _leave(alive: socket.socket) -> None:
    from . import coordinator

    try:
        alive.sendall(coordinator.FAILED if hasattr(sys, "last_value") else coordinator.LEFT)
    except OSError:  # the coordinator is gone, so nobody is there to be told
        return


def _listen(alive: socket.socket) -> None:
    with alive.makefile("r") as lines:
        for line in lines:
            rank, how = line.split()
            gone[int(rank)] = how
            for call in on_leave:
                call(int(rank), how)


def _serve(job: Job) -> tuple[subprocess.Popen[str], str]:
    """The coordinator's process, and its two ports as text."""
    host = "127.0.0.1" if job.master == "127.0.0.1" else "0.0.0.0"
    # Not as a script: its folder, with modules named like the standard library's, would be first in sys.path.
    start = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", start, str(Path(__file__).with_name("coordinator.py")), str(job.world), host],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], job.seconds)
    said = process.stdout.readline().strip() if ready else ""
    if not said:
        process.kill()
        raise RuntimeError(f"tpu: the process that serves JAX's coordinator did not start within {job.seconds:g} s "
                           f"(exit status {process.wait()}); its messages are above")
    return process, said
