"""Exceptions raised during backward(), on the autograd engine's own thread.

A Python error that crosses C++ frames there stays the thread's pending exception. While the engine unwinds, it asks the
device guard for its type; for a Python backend that is a Python call, which must not run with an exception pending:
PyTorch 2.13 then ends the process ("terminate called without an active exception"), or says "returned NULL without
setting an exception". So the guard takes the pending exception away, and run_backward raises it again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_lost: list[BaseException] = []


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[name-defined,misc]
    """The device guard of tpu: one device, one stream."""

    def type_(self) -> Any:
        try:
            _touch()
        except SystemError as error:  # "returned a result with an exception set"
            if error.__cause__ is None:
                raise
            _lost.append(error.__cause__)
        return _TYPE


_TYPE = torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]
_touch = functools.partial(int)  # any call into C tells whether an exception is pending


def install() -> None:
    """Makes backward() and grad() raise what their hooks, kernels and modes raised."""
    from torch.autograd import graph

    theirs = graph._engine_run_backward

    @functools.wraps(theirs)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return theirs(*args, **kwargs)
        except SystemError:
            if not _lost:
                raise
            error, _lost[:] = _lost[0], []
        raise error.with_traceback(error.__traceback__)

    for module in (graph, torch.autograd):
        module._engine_run_backward = run  # type: ignore[attr-defined]
