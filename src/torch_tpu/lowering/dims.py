"""PyTorch's `dim` arguments of reductions and scans: negative, absent, or for a 0-d tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def many(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes to reduce; None and an empty list mean all of them."""
    if isinstance(dim, int):
        dim = (dim,)
    if dim is None or len(dim) == 0 or ndim == 0:
        return tuple(range(ndim))
    return tuple(sorted(d % ndim for d in dim))


def along(fn: Callable[..., Any]) -> Callable[..., Any]:
    """For fn(x, axis) that keeps x's shape: accepts any dim, and 0-d values."""

    def call(x: Any, dim: int) -> Any:
        if x.ndim:
            return fn(x, dim % x.ndim)
        result = fn(x.reshape(1), 0)
        return tuple(r.reshape(()) for r in result) if isinstance(result, tuple) else result.reshape(())

    return call
