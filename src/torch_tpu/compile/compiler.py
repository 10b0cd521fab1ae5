"""torch.tpu.compiler: what was compiled in this process, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime import executable
from ..runtime.executable import CompileRecord

__all__ = ["CompileRecord", "Stats", "reset", "stats"]


@dataclass(frozen=True)
class Stats:
    """Programs of this process.

    Attributes:
        compiled: programs XLA compiled, eager operators included.
        loaded: programs taken from the disk cache.
        launches: programs run.
        trace_s: seconds spent in tracing to StableHLO.
        compile_s: seconds spent in XLA, or in loading from disk.
        graphs: one record for each compiled graph (torch.compile), in order.
    """

    compiled: int
    loaded: int
    launches: int
    trace_s: float
    compile_s: float
    graphs: tuple[CompileRecord, ...]


def stats() -> Stats:
    """A snapshot; subtract two to see what a piece of code cost."""
    now = executable.STATISTICS
    return Stats(now.compiled, now.loaded, now.launches, now.trace_s, now.compile_s, tuple(now.graphs))


def reset() -> None:
    """Sets all counts to zero."""
    executable.STATISTICS = executable.Statistics()
