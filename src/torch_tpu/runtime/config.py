"""Every environment variable torch_tpu reads, in one place. No JAX, no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path


class SettingError(ValueError):
    """A TORCH_TPU_* variable has a value that is not understood."""


@dataclass(frozen=True)
class Setting:
    """One environment variable: its name, its default, and what it does (shown by `torch-tpu doctor`)."""

    name: str
    default: str
    help: str

    def raw(self) -> str:
        return os.environ.get(self.name, self.default).strip()

    def flag(self) -> bool:
        value = self.raw().lower()
        if value in ("1", "true", "on", "yes"):
            return True
        if value in ("0", "false", "off", "no", ""):
            return False
        raise SettingError(f"{self.name}={self.raw()!r} is neither on nor off; use 1 or 0")

    def choice(self, *allowed: str) -> str:
        value = self.raw().lower()
        if value not in allowed:
            raise SettingError(f"{self.name}={self.raw()!r} is not known; choose one of {', '.join(allowed)}")
        return value

    def topics(self, *allowed: str) -> list[str]:
        """The words of a comma-separated list."""
        words = [word.strip() for word in self.raw().split(",") if word.strip()]
        for word in words:
            if word not in allowed:
                raise SettingError(f"{self.name}={self.raw()!r}: {word!r} is not known; list some of "
                                   f"{', '.join(allowed)}")
        return words

    def positive(self) -> int:
        value = self.raw()
        if not value.isdigit() or int(value) < 1:
            raise SettingError(f"{self.name}={value!r} must be a whole number of at least 1")
        return int(value)

    def positive_or_auto(self) -> int | None:
        """The number; None for auto."""
        return None if self.raw().lower() == "auto" else self.positive()

    def size_auto_or_off(self) -> float | None:
        """Bytes; infinity for off, None for auto."""
        value = self.raw().lower()
        return None if value == "auto" else math.inf if value in ("off", "0", "no", "false") else self.size()

    def size(self) -> int | None:
        """Bytes; accepts 512M, 16G, 16GiB, or a plain number. Empty means unset."""
        value = self.raw().lower().removesuffix("ib").removesuffix("b")
        if not value:
            return None
        scale = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}.get(value[-1], 1)
        digits = value[:-1] if scale > 1 else value
        try:
            size = int(float(digits) * scale)
        except (ValueError, OverflowError):
            size = -1
        if size < 0:
            raise SettingError(f"{self.name}={self.raw()!r} is not a size; write for example 512M or 16G")
        return size


class Switch:
    """An on/off setting that a program may change: the variable's value until `set` says otherwise."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._on: bool | None = None

    def on(self) -> bool:
        if self._on is None:
            self._on = self._setting.flag()
        return self._on

    def set(self, flag: bool) -> bool:
        """Switches; returns what was."""
        before = self.on()
        self._on = flag
        return before


PLATFORM = Setting("TORCH_TPU_PLATFORM", "auto", "what runs the device: auto, tpu, cpu (virtual chips) or cuda")
VIRTUAL_CHIPS = Setting("TORCH_TPU_VIRTUAL_CHIPS", "1", "how many virtual chips a machine without TPU shows")
VIRTUAL_HBM = Setting("TORCH_TPU_VIRTUAL_HBM", "", "memory of one virtual chip, for example 16G (default: 3/4 of RAM)")
FALLBACK = Setting("TORCH_TPU_FALLBACK", "warn", "operators that only the CPU has: warn (once each), silent or error")
DEBUG = Setting("TORCH_TPU_DEBUG", "0", "run synchronously, and check the values of arguments where the CPU does")
EAGER = Setting("TORCH_TPU_EAGER", "strict", "operators outside torch.compile: strict (one by one) or fused")
CACHE = Setting("TORCH_TPU_CACHE", "on", "keep compiled executables on disk: on or off")
CACHE_DIR = Setting("TORCH_TPU_CACHE_DIR", "", "folder for compiled executables (default: the user's cache folder)")
CACHE_SIZE = Setting("TORCH_TPU_CACHE_SIZE", "4G", "bound of that folder; the least recently used entries go first")
CACHE_WAIT = Setting("TORCH_TPU_CACHE_WAIT", "600",
                     "seconds to wait for another process that compiles the same program")
MALLOC = Setting("TORCH_TPU_MALLOC", "on", "virtual chips: let glibc keep large blocks instead of faulting them anew")
LOGS = Setting("TORCH_TPU_LOGS", "", "comma-separated: compile, recompile, fallback, or all; lines on stderr")
INTEGRATIONS = Setting("TORCH_TPU_INTEGRATIONS", "on", "adapt libraries when they are imported: on or off")
BUCKETS = Setting("TORCH_TPU_BUCKETS", "on", "Transformers: pad prompts and caches to few lengths")
HOST_INTEGERS = Setting("TORCH_TPU_HOST_INTEGERS", "on", "compute small integer tensors that the host knows there")
CAPTURE = Setting("TORCH_TPU_CAPTURE", "on", "Transformers: capture generate's forward; off: trace it by torch.compile")
FLASH_ATTENTION = Setting("TORCH_TPU_FLASH_ATTENTION", "auto",
                          "TPU programs: least size of attention scores that stay out of memory: auto, 256M, or off")
MATMUL_ROWS = Setting("TORCH_TPU_MATMUL_ROWS", "auto",
                      "bfloat16 products of fewer rows are padded to so many: auto (8 on TPU chips), or a number")
EAGER_COLLECTIVES = Setting("TORCH_TPU_EAGER_COLLECTIVES", "gloo",
                            "virtual chips, outside torch.compile: gloo (over the arrays' memory) or program (XLA's)")
HOSTS = Setting("TORCH_TPU_HOSTS", "", "hosts of a slice, by commas; the launcher sets it (else TPU_WORKER_HOSTNAMES)")

SETTINGS = (PLATFORM, VIRTUAL_CHIPS, VIRTUAL_HBM, FALLBACK, DEBUG, EAGER, CACHE, CACHE_DIR, CACHE_SIZE, CACHE_WAIT,
            MALLOC, LOGS, INTEGRATIONS, HOSTS, HOST_INTEGERS, BUCKETS, CAPTURE,
            FLASH_ATTENTION, MATMUL_ROWS, EAGER_COLLECTIVES)


def problems() -> list[str]:
    """What is wrong with the variables as they are set now; a line each."""
    found = []
    for read in (lambda: PLATFORM.choice("auto", "tpu", "cpu", "cuda"), VIRTUAL_CHIPS.positive, VIRTUAL_HBM.size,
                 lambda: FALLBACK.choice("warn", "silent", "error"), DEBUG.flag,
                 lambda: EAGER.choice("strict", "fused"), CACHE.flag, CACHE_SIZE.size,
                 CACHE_WAIT.positive, MALLOC.flag,
                 lambda: LOGS.topics("compile", "recompile", "fallback", "all"), INTEGRATIONS.flag,
                 HOST_INTEGERS.flag, BUCKETS.flag, CAPTURE.flag, MATMUL_ROWS.positive_or_auto,
                 FLASH_ATTENTION.size_auto_or_off,
                 lambda: EAGER_COLLECTIVES.choice("gloo", "program")):
        try:
            read()
        except SettingError as error:
            found.append(str(error))
    return found


def check() -> None:
    """Raises SettingError for variables whose values are not understood; asked when the device is first used."""
    found = problems()
    if found:
        raise SettingError("; ".join(found) + ". The tpu device starts with the variable corrected or unset.")


def cache_dir() -> Path:
    """The folder of the executable cache (not created here)."""
    given = CACHE_DIR.raw()
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "torch_tpu" / "executables"


def logs(topic: str) -> bool:
    """Whether lines of this topic were asked for with TORCH_TPU_LOGS."""
    wanted = [word.strip() for word in LOGS.raw().split(",")]
    return topic in wanted or "all" in wanted
