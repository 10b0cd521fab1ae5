"""What a process group does through the host: CPU tensors, barriers, and transfers from one rank to another, which XLA
could run only where all ranks agreed on their order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..runtime import processes
from .work import HostWork


def gloo(store: Any, rank: int, size: int, timeout: timedelta, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A plain gloo group for CPU tensors."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend = _backend(store, rank, size, timeout)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_group_name(f"{name}_host")
    group._set_group_desc("tensors on the host")
    return group


def _backend(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    own = processes.own_address()
    if own is None or os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    # Several hosts: gloo would take the address of this host's name, which may be loopback.
    options: Any = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def watch(group: Any, doing: str, launch: Callable[[], Any], after: Callable[[], None] | None = None,
          keep: Any = None, number: int | None = None, seconds: float | None = None) -> HostWork:
    """A gloo operation whose failure names the ranks.

    Args:
        after: called when it is done and waited for.
        keep: what the work gives as its result.
        number: of the collective in the group; a new one where it is None.
        seconds: its timeout, for messages; the group's where it is None.
    """
    if number is None:
        number = group.next_number()
    if seconds is None:
        seconds = group.timeout.total_seconds()

    def failed(error: BaseException) -> BaseException:
        first = str(error).strip().splitlines()[0]
        late = "imed out" in first
        if not late:  # at once: a launcher that saw the other rank die is about to end this one
            print(group.agreement.failing(number, doing, first), file=sys.stderr, flush=True)
        return dist.DistBackendError(group.explain(number, doing, f"timed out after {seconds:g} s" if late else
                                                   f"failed ({first})"))

    try:
        inner = launch()
    except RuntimeError as error:
        raise failed(error) from error
    return HostWork(inner, failed, after, keep, (group, number, doing))


def _one(tensors: Any) -> torch.Tensor:
    return tensors if isinstance(tensors, torch.Tensor) else tensors[0]


def send(group: Any, tensors: Any, destination: int, tag: int) -> Any:
    tensor = _one(tensors)
    staged = tensor.detach().cpu().contiguous() if tensor.device.type == "tpu" else tensor
    return watch(group, f"send to rank {group.ranks[destination]} ({tensor.dtype}[{tensor.numel()}])",
                 lambda: group.host.send([_carried(staged)], destination, tag), keep=[tensor])


def receive(group: Any, tensors: Any, source: int | None, tag: int) -> Any:
    tensor = _one(tensors)
    on_device = tensor.device.type == "tpu"
    staged = torch.empty(tensor.shape, dtype=tensor.dtype) if on_device else tensor

    def deliver() -> None:
        with torch.no_grad():
            tensor.detach().copy_(staged)

    origin = "any rank" if source is None else f"rank {group.ranks[source]}"

    def launch() -> Any:
        if source is None:
            return group.host.recv_anysource([_carried(staged)], tag)
        return group.host.recv([_carried(staged)], source, tag)

    return watch(group, f"receive from {origin} ({tensor.dtype}[{tensor.numel()}])", launch,
                 deliver if on_device else None, [tensor])


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: gloo knows only some dtypes."""
    return tensor.view(torch.uint8) if tensor.dim() and tensor.is_contiguous() else tensor


def alltoall(host: dist.ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
             opts: Any) -> Any:
    """gloo has no list form: one buffer with splits instead."""
    received = torch.empty(sum(t.numel() for t in outputs), dtype=outputs[0].dtype)
    sent = torch.cat([t.reshape(-1) for t in inputs])
    work = host.alltoall_base(received, sent, [t.numel() for t in outputs], [t.numel() for t in inputs], opts)

    def deliver() -> None:
        for part, output in zip(received.split([t.numel() for t in outputs]), outputs):
            output.copy_(part.view(output.shape))

    return HostWork(work, lambda error: error, deliver, list(outputs))
