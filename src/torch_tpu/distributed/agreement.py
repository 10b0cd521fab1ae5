"""Whether the ranks of a group launch the same collective: checked through the store the first time each kind is used
(every time with TORCH_DISTRIBUTED_DEBUG=DETAIL), and told when one does not end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..runtime import processes


class Agreement:
    """What the ranks of one group do.

    Args:
        store: shared by the ranks of the group.
        rank: this process's number in it.
        ranks: the global numbers of all.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], name: str) -> None:
        self.store, self.rank, self.ranks, self.name = store, rank, tuple(ranks), name
        self.known: set[str] = set()
        self.always = dist.get_debug_level() == dist.DebugLevel.DETAIL  # TORCH_DISTRIBUTED_DEBUG=DETAIL

    def check(self, number: int, doing: str, seconds: float) -> None:
        """Returns when all ranks said that their collective `number` is this one.

        Raises:
            DistBackendError: another rank does something else, or nothing, within the timeout.
        """
        if len(self.ranks) == 1 or (doing in self.known and not self.always):
            return
        keys = [f"do/{number}/{rank}" for rank in range(len(self.ranks))]
        self.store.set(keys[self.rank], doing.encode())
        self._wait(number, doing, keys, seconds)
        said = [each.decode() for each in self.store.multi_get(keys)]
        if any(each != doing for each in said):
            raise dist.DistBackendError(
                f"tpu: the ranks of group {self.name!r} disagree on collective {number}: "
                + "; ".join(f"rank {rank} calls {each}" for rank, each in zip(self.ranks, said))
                + ". Every rank must call the same collectives in the same order, with the same sizes and dtypes.")
        self.known.add(doing)

    def _wait(self, number: int, doing: str, keys: list[str], seconds: float) -> None:
        """Until all have said; not longer than there is hope. (store.wait prints a warning when its time is over.)"""
        until = time.monotonic() + seconds
        pause = 1e-3
        try:
            while not self.store.check(keys):
                gone = [rank for rank, key in zip(self.ranks, keys)
                        if rank in processes.gone and not self.store.check([key])]
                late = time.monotonic() > until
                if gone or late:
                    how = f"timed out after {seconds:g} s"
                    if gone:
                        how = f"failed (rank {gone[0]} {processes.gone[gone[0]]})"
                    raise dist.DistBackendError(self.explain(number, doing, how))
                time.sleep(pause)
                pause = min(pause * 1.5, 0.1)
        except dist.DistNetworkError as error:
            raise dist.DistBackendError(self.explain(number, doing, f"failed ({error})")) from error

    def _state(self, rank: int, said: dict[int, str]) -> str:
        how = processes.gone.get(self.ranks[rank], "")
        if rank in said:
            return f"is at {said[rank]}" + (f" and {how} since" if how else "")
        return {"left": "ended without this call", "failed": "ended with an error of its own", "died": "died"}.get(
            how, "does not answer: it hangs, or never came to this call")

    def _where(self, number: int, doing: str) -> str:
        return f"tpu: {doing}, collective {number} of group {self.name!r} (ranks {', '.join(map(str, self.ranks))})"

    def failing(self, number: int, doing: str, first: str) -> str:
        """The first word on a failure, before the other ranks are asked."""
        return f"{self._where(number, doing)}, fails on rank {self.ranks[self.rank]}: {first}"

    def explain(self, number: int, doing: str, how: str) -> str:
        """What happened to this rank's collective, and where the others are. Ranks that fail too say where they are;
        those that stay silent are dead, stopped, or busy with something else."""
        said: dict[int, str] = {}
        keys = {rank: f"at/{rank}" for rank in range(len(self.ranks)) if rank != self.rank}
        try:
            self.store.set(f"at/{self.rank}", f"{number} {doing}".encode())
            until = time.monotonic() + (3.0 if "timed out" in how else 1.0)
            while time.monotonic() < until and any(rank not in said and self.ranks[rank] not in processes.gone
                                                   for rank in keys):
                for rank, key in keys.items():
                    for each in (key, f"do/{number}/{rank}"):
                        if rank not in said and self.store.check([each]):
                            said[rank] = self.store.get(each).decode()
                time.sleep(0.05)
        except RuntimeError:  # the store went with the process that served it
            how += "; the store of the group cannot be reached any more, so the process that serves it is gone"
        others = [f"rank {self.ranks[rank]} {self._state(rank, said)}" for rank in keys]
        return f"{self._where(number, doing)}, {how} on rank {self.ranks[self.rank]}; {'; '.join(others)}"
