"""Ends this process when a program with collectives does not end, and at exit when one never will; says at once when a
rank is gone that a collective waits for."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..runtime import jax_door, processes

_PERIOD = 0.5
Doing = tuple[Any, int, str]  # a group, and the number and text of a collective


@dataclass
class Launched:
    """A program with collectives. XLA may run it in the launching call itself, so it is watched from before that."""

    group: Any
    number: int
    doing: str
    seconds: float
    deadline: float
    arrays: list[Any] | None = None
    said: bool = False

    def done(self) -> bool:
        return self.arrays is not None and all(array.is_deleted() or array.is_ready() for array in self.arrays)

    def error(self) -> str:
        """Why it ended without results, in one line; empty where it did not."""
        for array in self.arrays or ():
            if not array.is_deleted() and array.is_ready():
                try:
                    array.block_until_ready()
                except jax_door.XlaError as error:
                    return str(error).strip().splitlines()[0]
        return ""

    def say(self, why: str) -> None:
        if not self.said:
            self.said = True
            print(self.group.agreement.failing(self.number, self.doing, why), file=sys.stderr, flush=True)


class _Watch:
    """The programs under watch, and the thread that looks after them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.launched: list[Launched] = []
        self.thread: threading.Thread | None = None
        self.broken = False

    def add(self, item: Launched) -> None:
        with self.lock:
            # In order of launch: what was launched before a finished program is finished too.
            if self.launched and self.launched[-1].done() and not self.launched[-1].error():
                self.launched.clear()
            self.launched.append(item)
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name="torch_tpu watchdog", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(_PERIOD)
            with self.lock:
                for item in self.launched:
                    if item.done() and (error := item.error()):
                        item.say(error)
                self.launched = [item for item in self.launched if not item.done()]
                late = next((item for item in self.launched if time.monotonic() > item.deadline), None)
            if late is not None:
                message = late.group.explain(late.number, late.doing, f"timed out after {late.seconds:g} s")
                print(message, file=sys.stderr, flush=True)
                leave()


_watch = _Watch()
_waiting: Doing | None = None  # what the main thread waits for


def waits(doing: Doing | None) -> None:
    """Gloo or the other ranks are waited for, or (None) no more."""
    global _waiting
    _waiting = doing


def _left(rank: int, how: str) -> None:
    """Says what cannot end now. A launcher that sees a rank die ends the others within a tenth of a second, so this
    must not wait until gloo notices."""
    if _waiting is not None:
        group, number, text = _waiting
        if rank in group.ranks:
            print(group.agreement.failing(number, text, f"rank {rank} {how}"), file=sys.stderr, flush=True)
        return
    with _watch.lock:
        item = next((item for item in _watch.launched if not item.done() or item.error()), None)
    if item is not None and rank in item.group.ranks:
        item.say(f"rank {rank} {how}")
    elif how == "died":
        print(f"tpu: rank {rank} died", file=sys.stderr, flush=True)


processes.on_leave.append(_left)


def run(group: Any, number: int, doing: str, seconds: float, launch: Callable[[], list[Any]]) -> list[Any]:
    """Launches a program, and watches over it until its outputs are there.

    Raises:
        DistBackendError: it failed, for example since another rank left.
    """
    item = Launched(group, number, doing, seconds, time.monotonic() + seconds)
    _watch.add(item)
    try:
        item.arrays = launch()
    except RuntimeError as error:
        item.arrays = []
        if isinstance(error, dist.DistBackendError):
            raise
        # At once: a launcher that saw the other rank die is about to end this one.
        print(group.agreement.failing(number, doing, str(error).strip().splitlines()[0]), file=sys.stderr, flush=True)
        raise dist.DistBackendError(group.explain(number, doing, f"failed ({error})")) from error
    return item.arrays


def broken() -> None:
    """A collective will never end: XLA's threads wait for it, and waiting for the device at exit would be for ever."""
    if not _watch.broken:
        _watch.broken = True
        atexit.register(leave)


def leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
