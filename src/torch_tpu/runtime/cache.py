"""Compiled executables on disk, shared by all processes of a user. Whatever happens to the folder, programs run."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from . import cache_entry, cache_lock, config
from .cache_entry import Unusable
from .cache_totals import Totals

_KEEP = 0.9  # eviction goes down to this part of the bound, so that it is rare
_LOOK_AFTER_S = 86400  # the folder is looked through at least this often, by one of the processes that write to it
_LOOK_AFTER_WRITES = 256  # the same, by each process, where the file system has no locks
LEFT_AFTER_S = 3600  # no process writes a file for so long: whoever began it was killed

_T = TypeVar("_T")


class DiskCache:
    """Executables in a folder of mode 0700, bounded in size.

    No failure is an error: an entry that cannot be used is a miss, a folder that cannot be used is no cache, and one
    line on stderr says so.

    Attributes:
        usable: whether it is read. A folder that others could have written to is not.
        writable: whether it is written; ends with the first entry that cannot be written.
        hits, misses: of this process.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self.usable = True
        self.writable = True
        self._totals = Totals(folder)
        self._writes = 0
        self._noted: set[str] = set()
        self._process = os.getpid()
        self._guard = threading.Lock()  # of the counts and notes: several threads compile
        self._open()

    def _open(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = cache_entry.distrust(self.folder.stat())
        except OSError as error:
            self.usable = self.writable = False
            self._note(f"compiled executables cannot be kept in {self.folder} ({error.strerror or error}); every "
                       "process will compile anew. Set TORCH_TPU_CACHE_DIR to a writable folder, or "
                       "TORCH_TPU_CACHE=off to silence this.")
            return
        if why is not None:
            self.usable = self.writable = False
            self._note(f"the cache folder {self.folder} is not used: it {why}, so others could put programs there. "
                       "Make it your own (chown, chmod go-w), or set TORCH_TPU_CACHE_DIR to a folder of your own.")

    def get_or_make(self, key: str, name: str, environment: Mapping[str, str], load: Callable[[bytes], _T],
                    make: Callable[[], _T], save: Callable[[_T], bytes]) -> tuple[_T, bool]:
        """The executable, and whether it came from disk. Of several processes that ask at once, one makes it.

        Args:
            key: from cache_key.key.
            name: shown in messages and lists.
            environment: what `key` holds of versions, chip and CPU; an entry made elsewhere is discarded.
            load: raises Unusable for bytes that cannot be loaded.
            make: compiles.
            save: raises Unusable for an executable that cannot be kept.
        """
        found = self._load(key, environment, load)
        if found is None and self.writable:
            lock = cache_lock.Lock(self._beside(key, "lock"), name)
            try:
                if self._make_shard(key):
                    turn = lock.wait(lambda: os.path.exists(self._path(key)))
                    if turn is cache_lock.Turn.UNLOCKED and config.logs("compile"):
                        self._note(f"{self.folder} takes no lock files: each process compiles what it needs")
                    # It may have come while this process waited, or just before it had the lock.
                    found = self._load(key, environment, load)
                if found is None:
                    self._count(misses=1)
                    made = make()
                    self._save(key, name, environment, made, save)
                    return made, False
            finally:
                lock.release()
        if found is None:
            self._count(misses=1)
            return make(), False
        self._count(hits=1)
        return found, True

    def get(self, key: str, environment: Mapping[str, str] | None = None) -> bytes | None:
        """The bytes that were kept under the key, checked; None for a miss."""
        return self._load(key, environment or {}, lambda payload: payload)

    def put(self, key: str, payload: bytes, environment: Mapping[str, str] | None = None, name: str = "") -> None:
        """Keeps the bytes; when it returns the file is complete, and before there is none."""
        header = cache_entry.header_for(key, name, environment or {}, time.time(), payload)
        size = len(payload)
        if not self.writable:
            return
        if size > self.limit:
            self._note(f"{name} ({size / 2**20:,.1f} MiB) is larger than the bound of the cache "
                       f"({config.CACHE_SIZE.name}) and is not kept")
            return
        if not self._make_shard(key):
            return
        temporary = self._beside(key, f"{os.getpid()}.{secrets.token_hex(4)}.new")
        try:
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    size += file.write(cache_entry.pack(header))
                    file.write(payload)
                os.replace(temporary, self._path(key))
            finally:
                _remove(temporary)
        except OSError as error:
            self._written_no_more(error)
            return
        self._account(size)

    def _load(self, key: str, environment: Mapping[str, str], load: Callable[[bytes], _T]) -> _T | None:
        if not self.usable:
            return None
        inode = None
        try:
            content, inode = cache_entry.read(self._path(key))
            return load(cache_entry.payload(content, key, environment))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Unusable as why:
            self._discard(key, str(why), inode)
        except OSError as error:
            self._note(f"the cache entry {key} cannot be read ({error.strerror or error}); it is compiled again")
        return None

    def _save(self, key: str, name: str, environment: Mapping[str, str], made: _T,
              save: Callable[[_T], bytes]) -> None:
        if not self.writable:
            return
        try:
            payload = save(made)
        except Unusable as why:
            self._note(f"{name} cannot be kept on disk ({why}); every process compiles it")
            return
        self.put(key, payload, environment, name)

    def _discard(self, key: str, why: str, inode: int | None) -> None:
        path = self._path(key)
        removed = True
        try:
            # Not what another process put there meanwhile.
            if inode is None or path.stat(follow_symlinks=False).st_ino == inode:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        except FileNotFoundError:  # another process was faster
            pass
        except OSError:
            removed = False
        print(f"torch_tpu: {'discarded' if removed else 'ignored'} the cache entry {key}, which {why}; the program is "
              "compiled again", file=sys.stderr)

    def evict(self) -> None:
        """Drops the least recently used entries if the folder is over its bound, and what killed processes left."""
        entries = sorted(cache_entry.files(self.folder), key=lambda entry: entry[1].st_mtime)
        total = sum(info.st_size for _, info in entries)
        if total > self.limit:
            for path, info in entries:
                if total <= self.limit * _KEEP:
                    break
                if _remove(path):
                    total -= info.st_size
        self._totals.found(total)
        for path, info in cache_entry.leftovers(self.folder):
            if time.time() - info.st_mtime > LEFT_AFTER_S:
                if path.name.endswith(".lock"):
                    cache_lock.abandoned(path)
                else:
                    _remove(path)

    def flush(self) -> None:
        """Adds this process's hits and misses to those of all."""
        if os.getpid() == self._process and self.usable and self.writable and self.hits + self.misses:
            self._totals.add(hits=self.hits, misses=self.misses)
            self.hits = self.misses = 0

    def _account(self, size: int) -> None:
        self._writes += 1
        now = self._totals.add(bytes=size)
        if now is not None:
            due = now.get("bytes", self.limit + 1) > self.limit or time.time() - now.get("scanned", 0) > _LOOK_AFTER_S
        else:
            due = self._writes % _LOOK_AFTER_WRITES == 1
        if due:
            self.evict()

    def _make_shard(self, key: str) -> bool:
        """Whether the folder that the key's file lies in is there."""
        shard = self._path(key).parent
        try:
            if shard.is_symlink() or shard.is_file():
                shard.unlink()
                self._note(f"discarded {shard}, which is no folder")
            if not self.folder.is_dir():  # somebody removed it
                self._open()
            shard.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._written_no_more(error)
        return self.writable

    def _written_no_more(self, error: OSError) -> None:
        self.writable = False
        self._note(f"compiled executables cannot be kept in {self.folder} ({error.strerror or error}); those that are "
                   "there are used, others are compiled by every process. Make room or set TORCH_TPU_CACHE_DIR to a "
                   "writable folder, or TORCH_TPU_CACHE=off to silence this.")

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]

    def _beside(self, key: str, kind: str) -> Path:
        return self.folder / key[:2] / f".{key[2:]}.{kind}"

    def _count(self, hits: int = 0, misses: int = 0) -> None:
        with self._guard:
            self.hits += hits
            self.misses += misses

    def _note(self, text: str) -> None:
        """One line, once a process."""
        with self._guard:
            if text in self._noted:
                return
            self._noted.add(text)
        print(f"torch_tpu: {text}", file=sys.stderr)


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:  # already gone, or not to be removed: the next look at the folder finds it
        return False
    return True


class NoFolder(Exception):
    """There is no place for a cache; the text says why."""


def folder() -> Path:
    """Where the cache is, or would be.

    Raises:
        NoFolder: the user has no home folder, and no other place is set.
    """
    try:
        set_ = config.CACHE_DIR.raw() or os.environ.get("XDG_CACHE_HOME")
        if not set_ and not os.path.isdir(Path.home()):  # Path.is_dir raises where it may not look
            raise NoFolder(f"the home folder {Path.home()} does not exist")
        return config.cache_dir()
    except RuntimeError as error:  # no HOME, and no entry for this user
        raise NoFolder("this user has no home folder") from error


_lock = threading.Lock()
_cache: DiskCache | None = None
_homeless = False


def disk() -> DiskCache | None:
    """The process's disk cache; None under TORCH_TPU_CACHE=off, and where there is no place for it."""
    global _cache, _homeless
    if _homeless or not config.CACHE.flag():
        return None
    if _cache is None:
        with _lock:
            if _cache is None and not _homeless:
                try:
                    place = folder()
                except NoFolder as why:
                    _homeless = True
                    print(f"torch_tpu: compiled executables cannot be kept ({why}); every process will compile anew. "
                          "Set TORCH_TPU_CACHE_DIR to a writable folder, or TORCH_TPU_CACHE=off to silence this.",
                          file=sys.stderr)
                    return None
                _cache = DiskCache(place, config.CACHE_SIZE.size() or 2**62)
                atexit.register(_cache.flush)
    return _cache
