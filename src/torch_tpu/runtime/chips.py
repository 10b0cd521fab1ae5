"""Which chips this process has, and what it says when another one is asked for. No JAX."""

from __future__ import annotations

import torch

from . import platform

Device = torch.device | str | int | None


def count() -> int:
    """Chips of this host, virtual ones included. One process drives one of them, as tpu:0."""
    chosen = platform.choose()
    if chosen.chips is not None:
        return chosen.chips
    from . import client

    return len(client.get().devices)


def check(device: Device = None) -> int:
    """The index of this process's chip, which is 0.

    Raises:
        ValueError: `device` is not a tpu device.
        RuntimeError: it is another chip than tpu:0.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "tpu":
            raise ValueError(f"expected a tpu device, got {device}")
        device = device.index
    if device is not None and device != 0:
        raise other_chip(device)
    return 0


def other_chip(index: int | None) -> RuntimeError:
    have = count()
    if index is not None and 0 <= index < have:
        return RuntimeError(
            f"tpu:{index} belongs to another process: one process drives one chip, which it sees as tpu:0. To use all "
            f"{have} chips, start one process a chip: torchrun --nproc-per-node={have} your_script.py")
    return RuntimeError(f"tpu:{index} does not exist: this host has {have} chip(s), and one process drives one chip, "
                        "as tpu:0")
