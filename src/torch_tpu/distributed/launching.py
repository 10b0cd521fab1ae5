"""How a process group runs a collective: its number, its text for messages, its timeout, and the two ways it can go."""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from . import captured, host, host_memory, program, watchdog
from .agreement import Agreement
from .named import NamedGroup
from .work import Several, TpuWork

Tensor = torch.Tensor
# Typed as Any: torch's stubs of the C++ class lack half of its methods, and state the others too narrowly.
dist: Any = torch.distributed
_generations: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


@dataclass(frozen=True)
class Call:
    """One collective of this rank: its number in the group, what messages say of it, and how long it may take."""

    number: int
    doing: str
    timeout: timedelta


class LaunchingGroup(NamedGroup):
    """A group that launches collectives.

    Args:
        store: shared by the group's processes.
        rank: this process's number in the group.
        size: how many processes the group has.
        ranks: their numbers in the job.
        timeout: how long a collective may take.
        name: the group's name.
    """

    def __init__(self, store: Any, rank: int, size: int, ranks: Sequence[int], timeout: timedelta, name: str) -> None:
        super().__init__(rank, size, name)
        self.store = store
        self._rank, self._size = rank, size
        self.ranks = tuple(ranks)
        self.timeout = timeout
        # The store outlives a destroyed group of this name, and processes that torchrun starts again: their keys must
        # not be taken for the new one's.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"tpu{attempt}.{next(_generations[name])}/", store)
        self.host = host.gloo(dist.PrefixStore("host/", store), rank, size, timeout, self.ranks, name)
        self.gloo = self.host._get_backend(torch.device("cpu"))
        self.agreement = Agreement(dist.PrefixStore("watch/", store), rank, ranks, name)
        self.number = 0
        self.together: list[Any] | None = None  # works since _start_coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        """Every collective is launched at once; the works are waited for together."""
        self.together = []

    def _end_coalescing(self, device: torch.device) -> Several:
        works, self.together = self.together or [], None
        return Several(works)

    def _noted(self, work: Any) -> Any:
        if self.together is not None:
            self.together.append(work)
        return work

    def explain(self, number: int, doing: str, how: str) -> str:
        return self.agreement.explain(number, doing, how)

    def timeout_of(self, opts: Any) -> timedelta:
        given = getattr(opts, "timeout", None)
        return given if given is not None and given.total_seconds() > 0 else self.timeout

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def on_host(self, *tensors: Any) -> bool:
        """Whether a collective is about CPU tensors.

        Raises:
            RuntimeError: it mixes devices.
        """
        kinds = {t.device.type for t in tensors}
        if kinds <= {"tpu"}:
            return False
        if kinds == {"cpu"}:
            return True
        raise RuntimeError(f"a collective's tensors must be on one device, got {', '.join(sorted(kinds))}; move them "
                           "with .to('tpu')")

    def call(self, name: str, tensors: Sequence[Tensor], opts: Any) -> Call:
        """The next collective; the first of its kind returns when all ranks have said that it is this one.

        Args:
            name: what messages say, with what must be the same on all ranks.
            tensors: of the same dtypes and numbers of elements on all ranks.
            opts: has the timeout.
        """
        number, timeout = self.next_number(), self.timeout_of(opts)
        sizes = ", ".join([f"{str(t.dtype)[6:]}[{t.numel()}]" for t in tensors])
        doing = f"{name}({sizes})"
        self.compare(number, doing, timeout.total_seconds())
        return Call(number, doing, timeout)

    def compare(self, number: int, doing: str, seconds: float) -> None:
        """See Agreement.check."""
        watchdog.waits((self, number, doing))
        try:
            self.agreement.check(number, doing, seconds)
        finally:
            watchdog.waits(None)

    def carry(self, call: Call, carrier: host_memory.Carrier, inputs: Sequence[Tensor], outputs: Sequence[Tensor],
              result: Any) -> Any:
        """Through gloo, over the host memory of virtual chips."""
        return self._noted(host_memory.launch(self, call.number, call.doing, call.timeout, carrier, inputs, outputs,
                                              result))

    def execute(self, call: Call, name: str, body: program.Body, static: tuple[Any, ...], inputs: Sequence[Tensor],
                outputs: Sequence[Tensor], result: Any, extra: Sequence[Any] = ()) -> Any:
        """As an XLA program over the inputs' arrays (and `extra` ones); its results are written into the outputs."""
        if captured.on():
            captured.record(self, name, body, static, inputs, outputs, extra)
            return self.done(result)
        given = [*map(program.dense, inputs), *extra]
        arrays = watchdog.run(self, call.number, call.doing, call.timeout.total_seconds(),
                              lambda: program.run(name, body, static, given, self.ranks))
        for tensor, array in zip(outputs, arrays):
            program.store(tensor, array)
        return self._noted(TpuWork(self, call.number, call.doing, arrays, result, call.timeout))

    def done(self, result: Any) -> TpuWork:
        return TpuWork(self, self.number, "", [], result, self.timeout)


def padded(parts: Sequence[Tensor], longest: int | None = None) -> tuple[Tensor, int]:
    """The flattened parts as rows, with zeros after the shorter ones."""
    longest = max(p.numel() for p in parts) if longest is None else longest
    rows = [torch.nn.functional.pad(p.detach().reshape(-1), (0, longest - p.numel())) for p in parts]
    return torch.stack(rows), longest
