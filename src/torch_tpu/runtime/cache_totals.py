"""Bytes in the cache folder, hits and misses of all processes: one small file, updated under a lock.

It saves a look at every entry for each one that is added. It is an aid, not a truth: whatever happens to it, the next
look at the folder puts it right.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

_NUMBERS = ("bytes", "hits", "misses", "scanned")
_TRIES = 20


class Totals:
    """The numbers of a cache folder: bytes, hits, misses, and when the folder was last looked through."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".totals"

    def read(self) -> dict[str, float]:
        """Empty where there are none."""
        try:
            return _parse(self._path.read_bytes()[:1000])
        except OSError:
            return {}

    def add(self, **amounts: int) -> dict[str, float] | None:
        """The numbers after adding, without those that are not known; None where no numbers can be kept."""
        def change(now: dict[str, float]) -> None:
            for name, amount in amounts.items():
                if name in now or name != "bytes":  # bytes are not known before the folder was looked through
                    now[name] = now.get(name, 0) + amount
        return self._change(change)

    def found(self, bytes_: int) -> None:
        """The folder was looked through."""
        self._change(lambda now: now.update(bytes=bytes_, scanned=time.time()))

    def forget(self) -> None:
        """The folder was emptied: all counts begin anew."""
        self._change(dict.clear)
        self.found(0)

    def _change(self, change: Callable[[dict[str, float]], None]) -> dict[str, float] | None:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError:  # a read-only folder, a full disk
            return None
        try:
            if not _lock(descriptor):
                return None
            now = _parse(os.pread(descriptor, 1000, 0))
            change(now)
            text = json.dumps(now).encode()
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
            return now
        except OSError:
            return None
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.002)
    return False  # somebody who was stopped holds it: not worth waiting for


def _parse(text: bytes) -> dict[str, float]:
    """Empty for what is damaged: it is written in place, and a process can be killed while it writes."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: found[name] for name in _NUMBERS if isinstance(found.get(name), (int, float))}
