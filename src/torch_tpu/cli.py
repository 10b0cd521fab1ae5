"""torch-tpu doctor | cache | conformance"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .conformance import command as conformance_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torch-tpu",
                                     description="PyTorch on TPUs: what is installed, what works, and the cache")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="versions, chips, settings, a self test, and what is missing")
    doctor.add_argument("--no-test", action="store_true", help="do not start the device")
    cache = commands.add_parser("cache", help="the folder of compiled executables")
    cache.add_argument("action", choices=("list", "clear", "path", "stats"), nargs="?", default="stats")
    conformance = commands.add_parser("conformance", help="PyTorch's own operator tests on the device, against the CPU")
    conformance_command.arguments(conformance)
    given = parser.parse_args(arguments)
    if given.command == "conformance":
        return conformance_command.run(given)
    if given.command == "doctor":
        from . import doctor as subject

        return subject.run(test=not given.no_test)
    return _cache(given.action)


def _cache(action: str) -> int:
    import time

    from .runtime import config
    from .runtime.cache import DiskCache

    folder = config.cache_dir()
    if action == "path":
        print(folder)
        return 0
    if not folder.is_dir():
        print(f"{folder}: nothing there yet")
        return 0
    limit = config.CACHE_SIZE.size()
    disk = DiskCache(folder, limit or 2**62)
    entries = sorted(disk.entries(), key=lambda entry: -entry[2])
    total = sum(size for _, size, _ in entries)
    if action == "list":
        for path, size, used in entries:
            stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
            print(f"{stamp}  {size / 2**10:>10,.1f} KiB  {path.parent.name}{path.name}")
        return 0
    if action == "clear":
        failed = 0
        for path, _, _ in entries:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failed += 1
                print(f"torch-tpu: {path}: {error.strerror}", file=sys.stderr)
        print(f"{folder}: removed {len(entries) - failed} executables, {total / 2**20:,.1f} MiB")
        return 1 if failed else 0
    bound = f"{limit / 2**20:,.0f} MiB" if limit else "none"
    print(f"folder       {folder}\nexecutables  {len(entries)}\nsize         {total / 2**20:,.1f} MiB\n"
          f"bound        {bound}\nin use       {'yes' if config.CACHE.flag() else 'no (TORCH_TPU_CACHE=off)'}")
    return 0
