"""torch-tpu doctor: what this machine has, what runs the device and why, whether it works, and what is missing with the
command that supplies it. Works, and says something useful, also where torch or JAX is missing or broken."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform as host
import time
import traceback
from dataclasses import dataclass, field

from .runtime import config

PACKAGES = ("torch_tpu", "torch", "jax", "jaxlib", "libtpu", "numpy", "transformers", "accelerate", "safetensors",
            "kernels")
REQUIRED = {"torch": "pip install 'torch>=2.13,<2.15'", "jax": "pip install 'jax>=0.10,<0.12'",
            "jaxlib": "pip install 'jax>=0.10,<0.12'", "numpy": "pip install 'numpy>=2.0'"}


@dataclass
class Report:
    """Sections of lines to print, and problems: those that stop the device, and those worth knowing."""

    sections: list[tuple[str, list[str]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def section(self, title: str) -> list[str]:
        lines: list[str] = []
        self.sections.append((title, lines))
        return lines

    def error(self, line: str) -> None:
        if line not in self.errors:
            self.errors.append(line)

    def text(self) -> str:
        parts = []
        for title, lines in self.sections:
            parts.append(title + "\n" + "\n".join(f"  {line}" for line in lines))
        found = [f"  error: {line}" for line in self.errors] + [f"  note:  {line}" for line in self.hints]
        parts.append("Findings\n" + ("\n".join(found) if found else "  nothing is missing"))
        return "\n\n".join(parts)


def run(test: bool = True) -> int:
    """Prints the report; returns 0 when the device works, 1 when it does not."""
    report = examine(test)
    print(report.text())
    return 1 if report.errors else 0


def examine(test: bool = True) -> Report:
    report = Report()
    _versions(report)
    _platform(report)
    _settings(report)
    _cache(report)
    loaded = _load(report)
    if test and loaded:
        _self_test(report)
    return report


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions(report: Report) -> None:
    lines = report.section("Versions")
    lines.append(f"{'python':<14}{host.python_version()} ({host.system()} {host.machine()})")
    for name in PACKAGES:
        lines.append(f"{name:<14}{_version(name) or '-'}")
    missing: dict[str, str] = {}
    for name, command in REQUIRED.items():
        if _version(name) is None:
            missing.setdefault(command, name)
    for command, name in missing.items():
        report.error(f"{name} is not installed: {command}")


def _platform(report: Report) -> None:
    lines = report.section("Chips")
    if importlib.util.find_spec("torch") is None:
        return
    from .runtime import platform

    generation, chips = platform.scan_chips()
    lines.append(f"{'on this host':<14}{f'{chips} x {generation}' if chips else 'no TPU chip on the PCI bus'}")
    try:
        chosen = platform.choose()
    except config.SettingError:
        return  # the section on settings says it
    except RuntimeError as error:
        report.error(str(error))
        return
    what = "virtual chips (XLA on the CPU)" if chosen.virtual else chosen.name
    lines.append(f"{'platform':<14}{what}: {chosen.reason}")
    lines.append(f"{'devices':<14}{chosen.chips if chosen.chips is not None else 'known after the start'}")
    lines.append(f"{'memory':<14}{platform.hbm_bytes() / 2**30:,.1f} GiB a chip")
    if chips and not platform.has_libtpu():
        report.error("this host has TPU chips and no libtpu: pip install 'torch_tpu[tpu]'")
    if not chips and config.PLATFORM.raw() == "auto" and os.environ.get("TPU_NAME"):
        report.hints.append("TPU_NAME is set, but no chip is visible here; on a TPU VM run this as a user who may read "
                            "/dev/vfio or /dev/accel*, or set TORCH_TPU_PLATFORM=tpu")


def _settings(report: Report) -> None:
    lines = report.section("Settings (environment)")
    for setting in config.SETTINGS:
        mark = "*" if setting.name in os.environ else " "
        lines.append(f"{mark} {setting.name:<26}{setting.raw() or '(unset)':<12}{setting.help}")
    for problem in config.problems():
        report.error(problem)
    for name in sorted(os.environ):
        if name.startswith("TORCH_TPU_") and name not in {setting.name for setting in config.SETTINGS}:
            report.hints.append(f"{name} is set, but there is no such setting")


def _cache(report: Report) -> None:
    lines = report.section("Cache of compiled executables")
    try:
        folder = config.cache_dir()
    except RuntimeError as error:  # no home
        lines.append(f"none: {error}")
        return
    files = [path for path in folder.glob("??/*") if not path.name.startswith(".")] if folder.is_dir() else []
    size = 0
    for path in files:
        try:
            size += path.stat().st_size
        except OSError:
            continue  # removed by another process meanwhile
    lines.append(f"{folder}: {len(files)} executables, {size / 2**20:,.1f} MiB of at most {config.CACHE_SIZE.raw()}")
    parent = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if config.CACHE.raw().lower() in ("on", "1", "true", "yes") and not os.access(parent, os.W_OK):
        report.hints.append(f"{folder} cannot be written, so every process compiles anew: set TORCH_TPU_CACHE_DIR to a "
                            "writable folder")


def _load(report: Report) -> bool:
    lines = report.section("Device")
    if importlib.util.find_spec("torch") is None:
        return False
    from . import _autoload

    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0"
    lines.append(f"{'autoload':<14}" + ("on: `import torch` makes the device appear" if autoload else
                                        "off (TORCH_DEVICE_BACKEND_AUTOLOAD=0): import torch_tpu yourself"))
    points = [point.value for point in importlib.metadata.entry_points(group="torch.backends")]
    lines.append(f"{'entry points':<14}{', '.join(points) or '-'}")
    if not any(value.startswith("torch_tpu") for value in points):
        report.hints.append("torch_tpu is not installed as a package, so `import torch` does not find it: pip install "
                            "torch_tpu, or import torch_tpu yourself")
    others = [value for value in points if not value.startswith("torch_tpu")]
    if others:
        report.hints.append(f"other PyTorch backends are installed ({', '.join(others)}); PyTorch has room for one of "
                            "this kind in a process")
    _autoload.load()
    lines.append(f"{'registration':<14}{_autoload.state}")
    if _autoload.state != "loaded":
        report.error(f"the device is not registered: {_autoload.state}")
        return False
    return not config.problems()


def _self_test(report: Report) -> None:
    lines = report.section("Self test")
    begin = time.perf_counter()
    try:
        import torch

        device = torch.device("tpu")
        torch.tpu.init()  # type: ignore[attr-defined]
        started = time.perf_counter()
        tensor = torch.arange(6, dtype=torch.float32).to(device)
        first = (tensor * 2).cpu()
        ran = time.perf_counter()
        (tensor * 2).cpu()
        again = time.perf_counter()
    except Exception as error:
        lines.append("failed")
        lines += traceback.format_exc().strip().splitlines()[-3:]
        report.error(f"the device does not work: {error}")
        return
    name = torch.tpu.get_device_name()  # type: ignore[attr-defined]
    lines.append(f"{'chip':<14}{name}, {torch.tpu.device_count()} in this host")  # type: ignore[attr-defined]
    lines.append(f"{'start':<14}{started - begin:.2f} s (JAX and the operators)")
    lines.append(f"{'first op':<14}{(ran - started) * 1e3:.0f} ms (compiled or read from the cache)")
    lines.append(f"{'second op':<14}{(again - ran) * 1e3:.2f} ms")
    if first.tolist() != [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]:
        report.error(f"the self test computed {first.tolist()}")
