"""How operators outside of torch.compile run: `torch.tpu.set_eager_mode`."""

from __future__ import annotations

import sys


def set_eager_mode(mode: str) -> str:
    """Chooses how operators outside of torch.compile run.

    "strict" (the default) launches every operator at once. "fused" records them and runs many as one executable, when
    a result is needed on the host or by a compiled graph, or after 2,000 operators; the second time the same sequence
    occurs it is compiled as a whole. Results are the same up to the rounding that XLA's fusion changes. Wrong shapes
    and dtypes are reported by the operator itself in both modes; running out of memory where the batch runs.
    TORCH_TPU_EAGER sets the mode of a process from the start.

    Returns:
        The mode before.

    Raises:
        ValueError: for any other mode.
    """
    from ..eager import batch, dispatcher

    dispatcher.load()
    return batch.set_mode(mode)


def get_eager_mode() -> str:
    """"strict" or "fused"."""
    from ..eager import batch, dispatcher

    dispatcher.load()
    return batch.mode()


def settle() -> None:
    """Launches what fused mode has recorded."""
    batch = sys.modules.get("torch_tpu.eager.batch")
    if batch is not None:
        batch.run()
