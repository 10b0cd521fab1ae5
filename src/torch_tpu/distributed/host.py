"""What a process group does through the host: CPU tensors, barriers, and transfers from one rank to another, which XLA
could run only where all ranks agreed on their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .work import HostWork


def gloo(store: Any, rank: int, size: int, timeout: timedelta, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A plain gloo group for CPU tensors."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_group_name(f"{name}_host")
    group._set_group_desc("tensors on the host")
    return group


class Several(dist._Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = list(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self.works:
            work.wait(timeout) if timeout.total_seconds() > 0 else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def watch(group: Any, doing: str, launch: Callable[[], Any], after: Callable[[], None] | None = None,
          keep: Any = None) -> HostWork:
    """A gloo operation whose failure names the ranks."""
    number = group.next_number()

    def failed(error: BaseException) -> BaseException:
        first = str(error).strip().splitlines()[0]
        return dist.DistBackendError(group.explain(number, doing, f"failed ({first})"))

    try:
        inner = launch()
    except RuntimeError as error:
        raise failed(error) from error
    return HostWork(inner, failed, after, keep)


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
