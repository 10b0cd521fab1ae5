"""torch.tpu.debug: operators that check the values of their arguments, and the origin of NaN and Inf."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ..runtime import debug as state
from .nan_trace import Finding, NonFiniteError, nan_trace

__all__ = ["Finding", "NonFiniteError", "is_on", "mode", "nan_trace", "set_mode"]


def is_on() -> bool:
    """Whether debug mode is on."""
    return state.on()


def set_mode(on: bool) -> bool:
    """Switches debug mode for the process; TORCH_TPU_DEBUG=1 does it from the start.

    In debug mode each operator outside of torch.compile waits for its result, also in fused eager mode, and reads the
    values of arguments that the CPU would refuse: an index out of range, an integer division by zero, a negative
    weight of multinomial. The error is the CPU's, with the operator and the shapes.

    Returns:
        Whether it was on before.
    """
    batch, quick = (sys.modules.get(f"torch_tpu.eager.{name}") for name in ("batch", "quick"))
    if batch is not None and quick is not None:
        batch.run()  # what was recorded belongs to the time before
        quick.clear()
    return state.set(bool(on))


@contextlib.contextmanager
def mode(on: bool = True) -> Iterator[None]:
    """`with torch.tpu.debug.mode():` for one part of a program."""
    before = set_mode(on)
    try:
        yield
    finally:
        set_mode(before)
