"""What libtpu must find in the environment of each process of a slice. No JAX."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

# Chips of one host along x, y, z by their number (Google's system architecture pages).
_BOUNDS: dict[str, dict[int, tuple[int, int, int]]] = {
    "v4": {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)},
    "v5p": {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)},
    "v5e": {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)},
    "v6e": {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)},
    "v7x": {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1)},
}
PORT = 8476  # of the first process of a host; libtpu's own default


def hostnames() -> list[str]:
    """The hosts of the slice as the cluster names them; empty on a single host."""
    given = os.environ.get("TORCH_TPU_HOSTS") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    return names if len(names) > 1 else []


def host_number(hosts: Sequence[str]) -> int:
    """This host's place among them.

    Raises:
        ValueError: no variable says it, and the host's own name is not one of them.
    """
    for name in ("TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "NODE_RANK"):
        text = os.environ.get(name, "").strip()
        if text:
            if not text.isdigit() or int(text) >= len(hosts):
                raise ValueError(f"{name}={text!r} is no number of one of {len(hosts)} hosts ({', '.join(hosts)})")
            return int(text)
    own = socket.gethostname()
    found = [number for number, host in enumerate(hosts) if host == own or host.startswith(f"{own.split('.')[0]}.")]
    if len(found) != 1:
        raise ValueError(f"which of the hosts {', '.join(hosts)} this one is ({own}) is not known: set TPU_WORKER_ID "
                         "to its number, from 0")
    return found[0]


def visible_chips() -> list[int]:
    """The numbers of the host's chips that this job may use, by TPU_VISIBLE_CHIPS (or TPU_VISIBLE_DEVICES); empty where
    it may use all.

    Raises:
        ValueError: the variable is not a list of different numbers.
    """
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        words = [word.strip() for word in os.environ.get(name, "").split(",") if word.strip()]
        if words:
            if not all(word.isdigit() for word in words) or len(set(words)) != len(words):
                raise ValueError(f"{name}={os.environ[name]!r} is not a list of different chip numbers, such as 0,1")
            return [int(word) for word in words]
    return []


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
                       hosts: Sequence[str] = (), chips: Sequence[int] = ()) -> dict[str, str]:
    """What libtpu must find in one worker's environment: its own chip, and where the other processes of the slice are.

    Args:
        rank, world: the process and their number.
        local_rank, per_host: the same on this host.
        generation: "v4", "v5e", "v5p", "v6e" or "v7x".
        hosts: all hosts in order of rank; empty for a single one.
        chips: which chips of a host the job uses; empty for the first ones. Ports go by chip, so two jobs on different
            chips of one host do not meet.
    """
    x, y, z = bounds(generation, per_host)
    number = max(1, world // per_host)
    names = list(hosts) or ["localhost"]
    if len(names) != number:
        raise ValueError(f"{world} processes with {per_host} a host need {number} host(s), got {', '.join(names)}")
    own = list(chips) or list(range(per_host))
    if len(own) < per_host:
        raise ValueError(f"{per_host} processes a host, but TPU_VISIBLE_CHIPS names {len(own)} chip(s): one process "
                         "drives one chip")
    addresses = [f"{name}:{PORT + chip}" for name in names for chip in own[:per_host]]
    return {
        "TPU_VISIBLE_CHIPS": str(own[local_rank]),
        "TPU_VISIBLE_DEVICES": str(own[local_rank]),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": f"{x},{y * number},{z}" if number > 1 else f"{x},{y},{z}",
        "TPU_PROCESS_ADDRESSES": ",".join(addresses),
        "TPU_PROCESS_PORT": str(PORT + own[local_rank]),
        "CLOUD_TPU_TASK_ID": str(rank),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def export(rank: int, world: int, generation: str) -> None:
    """Exports it for this process, one of a job that torchrun started; keeps what the cluster has set."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % per_host))
    found = worker_environment(rank, local_rank, world, per_host, generation, hostnames(), visible_chips())
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):  # the job's list becomes this process's chip
        os.environ[name] = found.pop(name)
    for name, value in found.items():
        os.environ.setdefault(name, value)
