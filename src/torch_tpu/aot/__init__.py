"""Programs for TPU chips, compiled where there is none. Read trace.py, then libtpu_door.py, then report.py."""

from __future__ import annotations

from .compiling import Compiled, compile, trace
from .report import Report
from .topology import GENERATIONS

__all__ = ["GENERATIONS", "Compiled", "Report", "compile", "trace"]
