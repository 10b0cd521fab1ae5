"""torch-tpu doctor | cache | check | bench | conformance"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import bench, cache_command
from .aot import command as check_command
from .conformance import command as conformance_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torch-tpu",
                                     description="PyTorch on TPUs: what is installed, what works, and the cache")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="versions, chips, settings, a self test, and what is missing")
    doctor.add_argument("--no-test", action="store_true", help="do not start the device")
    cache = commands.add_parser("cache", help="the folder of compiled executables")
    cache.add_argument("action", choices=cache_command.ACTIONS, nargs="?", default="stats",
                       help="; ".join(f"{name}: {what}" for name, what in cache_command.ACTIONS.items()))
    check_command.arguments(commands.add_parser(
        "check", help="whether a Transformers model fits on TPU chips and how fast it can be; needs no chip"))
    bench.arguments(commands.add_parser("bench", help="how fast this machine is, on one screen for a bug report"))
    conformance = commands.add_parser("conformance", help="PyTorch's own operator tests on the device, against the CPU")
    conformance_command.arguments(conformance)
    given = parser.parse_args(arguments)
    if given.command == "conformance":
        return conformance_command.run(given)
    if given.command == "check":
        return check_command.run(given)
    if given.command == "bench":
        return bench.run(given)
    if given.command == "doctor":
        from . import doctor as subject

        return subject.run(test=not given.no_test)
    return cache_command.run(given.action)

