"""Which chips this process has, and what it says when another one is asked for. No JAX."""

from __future__ import annotations

from ..runtime import platform


def count() -> int:
    """Chips of this host, virtual ones included. One process drives one of them, as tpu:0."""
    chosen = platform.choose()
    if chosen.chips is not None:
        return chosen.chips
    from ..runtime import client

    return len(client.get().devices)


def other_chip(index: int | None) -> RuntimeError:
    have = count()
    if index is not None and 0 <= index < have:
        return RuntimeError(
            f"tpu:{index} belongs to another process: one process drives one chip, which it sees as tpu:0. To use all "
            f"{have} chips, start one process a chip: torchrun --nproc-per-node={have} your_script.py")
    return RuntimeError(f"tpu:{index} does not exist: this host has {have} chip(s), and one process drives one chip, "
                        "as tpu:0")
