"""torch.tpu.compiler: what was compiled in this process, and how long it took."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..runtime import executable
from ..runtime.executable import CompileRecord

__all__ = ["CompileRecord", "Stats", "dump", "explain", "reset", "stats"]


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


def explain() -> str:
    """A table of the graphs this process compiled: why, how long tracing and XLA took, and whether the disk cache had
    them. To print. TORCH_TPU_LOGS=compile prints every compilation as it happens, TORCH_TPU_LOGS=recompile only those
    of code that was compiled before."""
    now = executable.STATISTICS
    rows = [("graph", "trace s", "XLA s", "from", "why")]
    rows += [(r.name, f"{r.trace_s:.2f}", f"{r.compile_s:.2f}", r.source, r.cause) for r in now.graphs]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]) for row in rows]
    lines.append(f"{now.compiled} programs compiled, {now.loaded} from the disk cache (eager operators included), "
                 f"{now.launches} launches, tracing {now.trace_s:.1f} s, XLA {now.compile_s:.1f} s")
    return "\n".join(lines)


def dump(folder: str | os.PathLike[str] | None) -> None:
    """Writes every graph compiled from now on to a folder: its FX nodes (`.fx.txt`), its StableHLO (`.stablehlo.mlir`),
    and the HLO that XLA made of it (`.hlo.txt`). None stops it."""
    executable.dump_to(folder)
