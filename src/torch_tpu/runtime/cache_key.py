"""What an executable depends on: its program, and everything around it that changes the code XLA makes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform as host
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import client, jax_door

# Read by XLA or libtpu when they start. XLA_FLAGS may name a file instead of holding flags.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PJRT_NPROC", "NPROC", "TF_XLA_FLAGS")


@functools.cache
def environment() -> dict[str, str]:
    """Versions, chip and (for virtual chips) CPU: an executable made under others must not be loaded."""
    import jax
    import jaxlib

    device = client.get().device
    found = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "client": jax_door.client_version(device),
             "device": device.device_kind, "machine": host.machine()}
    if client.get().platform.virtual:
        found["cpu"] = _cpu(Path("/proc/cpuinfo"))
        found["cores"] = str(_cores())
    return found


def _cpu(info: Path) -> str:
    """Model and instruction sets; XLA compiles for exactly this CPU."""
    try:
        lines = info.read_text().split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return host.processor()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kept = {name: fields[name] for name in names if name in fields}
    features = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
    return f"{kept.get('model name', host.machine())} ({features})"


def _cores() -> int:
    """XLA:CPU divides the loops of a program among the cores that the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _variables() -> list[str]:
    found = []
    for name in _VARIABLES:
        value = os.environ.get(name, "").strip()
        if name == "XLA_FLAGS" and value and not value.startswith("-"):
            try:
                value = Path(value).read_text()
            except OSError:  # XLA says what is wrong with it
                pass
        if value:
            found.append(f"{name}={value}")
    return found


def key(module: bytes, device: Any, options: dict[str, Any] | None, replicas: Sequence[Any],
        partitioned: Any = None) -> str:
    """64 hexadecimal digits.

    Args:
        module: StableHLO without source locations; holds shapes, dtypes, precisions, donation, random generators.
        device: the chip of this process.
        options: XLA options of this program.
        replicas: the chips that run it together, for one with collectives.
        partitioned: XLA's compile options of a program that XLA divides among those chips.
    """
    # A program of one chip is the same on every chip, so ranks share it; one with collectives holds the chips' numbers.
    chips = list(replicas) or [SimpleNamespace(id=0)]
    xla = jax_door.compile_options(device, options, chips) if partitioned is None else partitioned
    around = [environment(), _variables(), sorted((options or {}).items()), [chip.id for chip in replicas],
              device.id if replicas else None]
    digest = hashlib.sha256(json.dumps(around, default=repr).encode())
    for part in (xla.SerializeAsString(), module):  # the options that XLA_FLAGS and jax.config amount to
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
