"""A registry of operators that are more than a lowering: creation, copies, views, sizes that depend on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}


def kernel(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a Python function over torch tensors as the device's kernel of the named overloads."""

    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in KERNELS:
                raise ValueError(f"{name} has two kernels: {KERNELS[name].__module__} and {fn.__module__}")
            KERNELS[name] = fn
        return fn

    return enter
