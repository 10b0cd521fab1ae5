"""Ends this process when a program with collectives does not end, and at exit when one never will."""

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

_PERIOD = 0.5


@dataclass
class Launched:
    """A program with collectives. XLA may run it in the launching call itself, so it is watched from before that."""

    group: Any
    number: int
    doing: str
    seconds: float
    deadline: float
    arrays: list[Any] | None = None

    def done(self) -> bool:
        return self.arrays is not None and all(array.is_deleted() or array.is_ready() for array in self.arrays)


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
            if self.launched and self.launched[-1].done():
                self.launched.clear()
            self.launched.append(item)
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name="torch_tpu watchdog", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(_PERIOD)
            with self.lock:
                self.launched = [item for item in self.launched if not item.done()]
                late = next((item for item in self.launched if time.monotonic() > item.deadline), None)
            if late is not None:
                message = late.group.explain(late.number, late.doing, f"timed out after {late.seconds:g} s")
                print(message, file=sys.stderr, flush=True)
                leave()


_watch = _Watch()


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
        print(f"tpu: {doing} failed; asking the other ranks where they are", file=sys.stderr, flush=True)
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
