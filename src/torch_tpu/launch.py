"""python -m torch_tpu.launch [torchrun's options] script.py ...: one process for each chip of this host."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_PROCESSES = ("--nproc-per-node", "--nproc_per_node")
_RENDEZVOUS = ("--standalone", "--rdzv", "--master", "--nnodes", "--node-rank", "--node_rank")


def arguments(given: Sequence[str], chips: int) -> list[str]:
    """torchrun's arguments: all chips of the host, and a rendezvous of its own, unless the caller says otherwise."""
    options = list(given)
    own = []
    for item in options:
        if not item.startswith("-"):
            break
        own.append(item)
    if not any(item.startswith(_PROCESSES) for item in own):
        options.insert(0, f"--nproc-per-node={chips}")
    if not any(item.startswith(_RENDEZVOUS) for item in own):
        options.insert(0, "--standalone")
    return options


def main(given: Sequence[str] | None = None) -> None:
    """Prepares the environment and runs torchrun."""
    from torch.distributed import run

    from .distributed import set_tpu_launch_env
    from .runtime import chips

    options = arguments(sys.argv[1:] if given is None else given, chips.count())
    set_tpu_launch_env()
    run.main(options)


if __name__ == "__main__":
    main()
