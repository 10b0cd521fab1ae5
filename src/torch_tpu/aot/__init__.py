"""Programs for TPU chips, compiled where there is none. Read tracing.py, then libtpu_door.py, then report.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiling import Compiled, compile, compile_program, trace
    from .report import Report
    from .saved import Saved, export, load
    from .topology import GENERATIONS

__all__ = ["GENERATIONS", "Compiled", "Report", "Saved", "compile", "compile_program", "export", "load", "trace"]


def __getattr__(name: str) -> Any:
    """What the package has, imported at its first use: `torch-tpu` lists its commands without JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import compiling, report, saved, topology

    homes = {"Report": report, "GENERATIONS": topology, "Saved": saved, "export": saved, "load": saved}
    return getattr(homes.get(name, compiling), name)
