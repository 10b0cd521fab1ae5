"""python -m torch_tpu.launch [torchrun's options] script.py ...: one process for each chip of this host."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_PROCESSES = ("--nproc-per-node", "--nproc_per_node")
_RENDEZVOUS = ("--standalone", "--rdzv", "--master", "--nnodes", "--node-rank", "--node_rank")
_WITHOUT_VALUE = ("--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank", "-h", "--help")


def arguments(given: Sequence[str], chips: int, hosts: int = 1) -> list[str]:
    """torchrun's arguments: all chips of the host, and on a single host a rendezvous of its own on a free port, unless
    the caller says otherwise. On several hosts the environment says the rest (set_tpu_launch_env)."""
    options, own = list(given), _own(given)
    if not any(item.startswith(_PROCESSES) for item in own):
        options.insert(0, f"--nproc-per-node={chips}")
    if hosts == 1 and not any(item.startswith(_RENDEZVOUS) for item in own):
        options.insert(0, "--standalone")
    return options


def _own(given: Sequence[str]) -> list[str]:
    """The names of the options before the script."""
    names: list[str] = []
    items = iter(given)
    for item in items:
        if not item.startswith("-"):
            break
        names.append(item)
        if "=" not in item and item.replace("_", "-") not in _WITHOUT_VALUE:
            next(items, None)
    return names


def main(given: Sequence[str] | None = None) -> None:
    """Prepares the environment and runs torchrun."""
    from torch.distributed import run

    from .distributed import set_tpu_launch_env
    from .runtime import chips, slices

    given = sys.argv[1:] if given is None else given
    chosen = any(item.startswith(_RENDEZVOUS) for item in _own(given))
    hosts = 1 if chosen else len(slices.hostnames()) or 1
    set_tpu_launch_env(nnodes=hosts)
    run.main(arguments(given, len(slices.visible_chips()) or chips.count(), hosts))


if __name__ == "__main__":
    main()
