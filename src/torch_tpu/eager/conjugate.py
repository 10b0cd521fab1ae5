"""Operators that PyTorch hands tensors whose conjugation or negation is still a flag (matrix products use it, views
keep it): ours see plain memory, so the flag is resolved first, and set again on what is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .plan import Plan


def sees_flags(qualified: str) -> bool:
    """Whether PyTorch passes the operator by its own resolution of flags (a fallthrough at these keys)."""
    if qualified.partition(".")[0].endswith("_like"):
        return False  # takes nothing but the layout
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key) for key in ("Conjugate", "Negative"))


def _flagged(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def resolving(made: Plan, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of a plan, for arguments that may carry flags."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if _flagged(value):
                return _resolved(made, kernel, args, kwargs)
        for value in kwargs.values():
            if _flagged(value):
                return _resolved(made, kernel, args, kwargs)
        return kernel(*args, **kwargs)

    return run


def _resolved(made: Plan, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(made.names, args))
    given.update(kwargs)
    plain = {name: value.clone() if _flagged(value) else value for name, value in given.items()}
    result = kernel(*(plain[name] for name in made.names[:len(args)]), **{name: plain[name] for name in kwargs})
    returned = list(result) if isinstance(result, tuple) else [result]
    for name, _ in made.writes:
        if _flagged(given[name]):
            given[name].copy_(plain[name])
            returned = [given[name] if value is plain[name] else value for value in returned]
    return tuple(returned) if isinstance(result, tuple) else returned[0]
