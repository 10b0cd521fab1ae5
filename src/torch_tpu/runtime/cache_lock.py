"""A lock file a key: of several processes that need the same executable, one compiles it."""

from __future__ import annotations

import enum
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import config


class Turn(enum.Enum):
    """How waiting ended."""

    MINE = "nobody else compiles it: this process does"
    READY = "somebody else compiled it"
    LATE = "somebody else still compiles it, and this process waits no longer"
    UNLOCKED = "the file system has no locks, or the folder cannot be written"


class Lock:
    """Held from `wait` to `release`. A process that dies lets go of it, whatever it was doing."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._descriptor: int | None = None

    def wait(self, ready: Callable[[], bool]) -> Turn:
        """Takes the lock, or waits until `ready` (asked again and again) or the time is over."""
        seconds = config.CACHE_WAIT.positive()
        begin = time.monotonic()
        pause = 0.005
        notice = _Notice(self._name)
        try:
            while True:
                try:
                    if self._take():
                        return Turn.MINE
                    owner = self._owner()
                except OSError:
                    return Turn.UNLOCKED
                if ready():
                    return Turn.READY
                waited = time.monotonic() - begin
                if waited > seconds:
                    notice.end()
                    print(f"torch_tpu: waited {seconds} s for {owner}, which compiles {self._name}; this process now "
                          f"compiles it too ({config.CACHE_WAIT.name} is the time to wait)", file=sys.stderr)
                    return Turn.LATE
                notice.show(owner, waited)
                time.sleep(pause)
                pause = min(pause * 1.5, 0.2)
        finally:
            notice.end()

    def release(self) -> None:
        if self._descriptor is None:
            return
        try:
            self._path.unlink()  # while it is held: whoever opened it sees that it is gone, and makes a new one
        except OSError:  # the folder was removed or became read-only; the lock ends all the same
            pass
        _held.discard(self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a forked child has the descriptor too
        except OSError:  # a network file system that is gone; closing ends the lock
            pass
        os.close(self._descriptor)
        self._descriptor = None

    def _take(self) -> bool:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            mine = False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = _same(descriptor, self._path)
            except BlockingIOError:
                return False
            finally:
                if not mine:
                    os.close(descriptor)
            if mine:
                break  # else its holder removed it before letting go
        self._descriptor = descriptor
        _held.add(descriptor)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
        except OSError:  # a full disk: locked all the same, only without a name
            pass
        return True

    def _owner(self) -> str:
        try:
            number, _, host = self._path.read_text(errors="replace")[:300].partition(" ")
        except OSError:  # it let go meanwhile
            return "another process"
        if not number.isdigit():
            return "another process"
        return f"process {number}" + (f" on {host}" if host != socket.gethostname() else "")


def abandoned(path: Path) -> bool:
    """Removes the file of a lock whose holder died; whether there was one to remove."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _same(descriptor, path):
            path.unlink()
            return True
    except OSError:  # held, or not to be removed
        pass
    finally:
        os.close(descriptor)
    return False


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


class _Notice:
    """Says for whom this process waits: at once with TORCH_TPU_LOGS=compile, after a second on a terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = False
        self._shown = False

    def show(self, owner: str, waited: float) -> None:
        text = f"torch_tpu: waiting for {owner}, which compiles {self._name} ..."
        if not self._said and config.logs("compile"):
            self._said = True
            print(text, file=sys.stderr)
        elif not self._said and waited > 1 and sys.stderr.isatty() and not self._shown:
            self._shown = True
            sys.stderr.write(text + "\r")
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            self._shown = False
            sys.stderr.write("\033[K")
            sys.stderr.flush()


# Descriptors of the locks that this process holds. A forked child would keep a dead parent's locks alive.
_held: set[int] = set()


def _after_fork() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
