"""`torch-tpu cache list | clear | path | stats`: the folder of compiled executables. Needs neither torch nor JAX."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from .runtime import cache, cache_entry, cache_lock, config
from .runtime.cache_totals import Totals

ACTIONS = {
    "list": "every executable: last use, age, size, jax version, key, name",
    "clear": "remove all executables, without asking",
    "path": "print the folder",
    "stats": "number, size, bound, hits and misses (the default)",
}


def run(action: str) -> int:
    try:
        folder = cache.folder()
        limit = config.CACHE_SIZE.size()
        used = "yes" if config.CACHE.flag() else "no (TORCH_TPU_CACHE=off)"
    except (cache.NoFolder, config.SettingError) as error:
        print(f"torch-tpu: {error}", file=sys.stderr)
        return 1
    if action == "path":
        print(folder)
        return 0
    if not os.path.isdir(folder):
        print(f"{folder}: nothing there yet")
        return 0
    if action == "list":
        return _list(folder)
    if action == "clear":
        return _clear(folder)
    why = cache_entry.distrust(folder.stat())
    if why is not None:
        used = f"no: the folder {why}"
    return _stats(folder, limit, used)


def _list(folder: Path) -> int:
    found = sorted(cache_entry.files(folder), key=lambda entry: -entry[1].st_mtime)
    if not found:
        print(f"{folder}: no executables")
        return 0
    print(f"{'last use':<16}  {'age':>8}  {'size':>12}  {'jax':<9}  {'key':<64}  name")
    for path, info in found:
        age, version = "-", "-"
        try:
            header = cache_entry.read_header(path)
            name, age = header.name or "-", _duration(time.time() - header.created)
            version = header.environment.get("jax", "-")
        except FileNotFoundError:  # removed meanwhile
            continue
        except cache_entry.Unusable as error:
            name = f"({error})"
        except OSError as error:
            name = f"(cannot be read: {error.strerror})"
        print(f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(info.st_mtime))}  {age:>8}  "
              f"{info.st_size / 2**10:>8,.1f} KiB  {version:<9}  {path.parent.name}{path.name}  {name}")
    return 0


def _clear(folder: Path) -> int:
    removed = size = failed = 0
    for path, info in cache_entry.files(folder):
        try:
            path.unlink()
        except FileNotFoundError:  # another process was faster
            continue
        except OSError as error:
            failed += 1
            print(f"torch-tpu: {path}: {error.strerror}", file=sys.stderr)
            continue
        removed += 1
        size += info.st_size
    for path, info in cache_entry.leftovers(folder):
        if path.name.endswith(".lock"):
            cache_lock.abandoned(path)
        elif time.time() - info.st_mtime > cache.LEFT_AFTER_S:
            path.unlink(missing_ok=True)
    Totals(folder).forget()
    print(f"{folder}: removed {removed} executables, {size / 2**20:,.1f} MiB freed")
    return 1 if failed else 0


def _stats(folder: Path, limit: int | None, used: str) -> int:
    sizes = [info.st_size for _, info in cache_entry.files(folder)]
    totals = Totals(folder).read()
    hits, misses = int(totals.get("hits", 0)), int(totals.get("misses", 0))
    share = f" ({hits / (hits + misses):.0%} of {hits + misses:,})" if hits + misses else ""
    print(f"folder       {folder}\nexecutables  {len(sizes)}\nsize         {sum(sizes) / 2**20:,.1f} MiB\n"
          f"bound        {f'{limit / 2**20:,.0f} MiB' if limit else 'none'}\n"
          f"hits         {hits:,}{share}\nmisses       {misses:,}\nin use       {used}")
    return 0


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
