"""What a captured step needs of torch's private parts. Tried on torch 2.13.0; tests/test_compile_step.py uses each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def compiling() -> AbstractContextManager[None]:
    """torch.compiler.is_compiling() is True: libraries then leave out what reads values on the host."""
    return torch.compiler._compile_session_context()


def eager_stance() -> AbstractContextManager[Any]:
    """Functions given to torch.compile run as they are: the step's own program covers them."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def compiles() -> bool:
    """Whether torch.compile would compile now: not under TORCHDYNAMO_DISABLE, or another stance of torch.compiler
    (torch 2.13)."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return False
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is None or (frames._stance.stance == "default" and not frames.config.disable)


def count_graph() -> None:
    """A graph in the place of one of Dynamo's is counted where Dynamo counts its own, for those who look there."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters["stats"]["unique_graphs"] += 1


@contextmanager
def scaler_steps(run: Callable[..., Any]) -> Iterator[None]:
    """GradScaler decides by a value on the device whether the optimizer steps: `run(optimizer, found_inf, ...)`."""
    from torch.amp.grad_scaler import GradScaler

    theirs = GradScaler._maybe_opt_step

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return run(optimizer, list(state["found_inf_per_device"].values()), args, kwargs)

    GradScaler._maybe_opt_step = step  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        GradScaler._maybe_opt_step = theirs  # type: ignore[method-assign]


@contextmanager
def symbolic_extrema() -> Iterator[None]:
    """Adafactor takes min and max of numbers that it reads from the device: torch.sym_min and sym_max keep them
    there."""
    from torch.optim import _adafactor

    _adafactor.min, _adafactor.max = torch.sym_min, torch.sym_max  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _adafactor.min, _adafactor.max  # type: ignore[attr-defined]
