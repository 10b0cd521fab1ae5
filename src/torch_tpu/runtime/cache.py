"""Compiled executables on disk: one checksummed file each, written atomically, bounded in size, never unpickled."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import threading
from pathlib import Path

from . import config

_MAGIC = b"torch_tpu executable 1\n"
_EVICT_EVERY = 256


class DiskCache:
    """Executables in a folder of mode 0700. Every failure is a miss, said once on stderr, never an error."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self.usable = True
        self._writes = 0
        self._noted = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)

    def get(self, key: str) -> bytes | None:
        if not self.usable:
            return None
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            self.misses += 1
            return None
        head = len(_MAGIC) + 32
        payload = content[head:]
        if content[: len(_MAGIC)] != _MAGIC or hashlib.sha256(payload).digest() != content[len(_MAGIC):head]:
            self.discard(key, "damaged")
            self.misses += 1
            return None
        self.hits += 1
        try:
            os.utime(path)
        except OSError:  # a read-only cache still serves
            pass
        return payload

    def put(self, key: str, payload: bytes) -> None:
        if not self.usable:
            return
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True) if temporary.parent.exists() and os.access(temporary.parent, os.W_OK) \
                else None
            self._give_up(error)
            return
        self._writes += 1
        if self._writes % _EVICT_EVERY == 1:
            self.evict()

    def discard(self, key: str, why: str) -> None:
        """Removes an entry that cannot be used and says so."""
        print(f"torch_tpu: discarded a {why} cache entry ({self._path(key).name}); it is compiled again",
              file=sys.stderr)
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError:
            pass  # unreadable or read-only: it is ignored, and the compile result replaces it where possible

    def entries(self) -> list[tuple[Path, int, float]]:
        """(file, bytes, time of last use) of every entry."""
        found = []
        for path in self.folder.glob("??/*"):
            if path.name.startswith("."):
                continue
            try:
                stat = path.stat()
            except OSError:
                continue  # another process removed it
            found.append((path, stat.st_size, stat.st_mtime))
        return found

    def evict(self) -> None:
        """Drops the least recently used entries until the folder is within its bound."""
        entries = sorted(self.entries(), key=lambda entry: entry[2])
        total = sum(size for _, size, _ in entries)
        for path, size, _ in entries:
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]

    def _give_up(self, error: OSError) -> None:
        self.usable = False
        if not self._noted:
            self._noted = True
            print(f"torch_tpu: compiled executables cannot be kept in {self.folder} ({error.strerror or error}); every "
                  "process will compile anew. Set TORCH_TPU_CACHE_DIR to a writable folder, or TORCH_TPU_CACHE=off to "
                  "silence this.", file=sys.stderr)


_lock = threading.Lock()
_cache: DiskCache | None = None


def disk() -> DiskCache | None:
    """The process's disk cache; None under TORCH_TPU_CACHE=off."""
    global _cache
    if not config.CACHE.flag():
        return None
    if _cache is None:
        with _lock:
            if _cache is None:
                _cache = DiskCache(config.cache_dir(), config.CACHE_SIZE.size() or 2**62)
    return _cache
