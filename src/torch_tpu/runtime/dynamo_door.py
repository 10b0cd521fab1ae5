"""Keeps Dynamo away from code that runs between the parts of a broken graph. Private; tried on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._dynamo import eval_frame as _eval_frame


@contextmanager
def untraced() -> Iterator[None]:
    """Frames entered within the block are not captured: JAX's own Python code must not become a graph."""
    before = _eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        _eval_frame.set_eval_frame(before)
