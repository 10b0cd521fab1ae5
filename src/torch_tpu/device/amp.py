"""torch.autocast("tpu"): the part that must be there before JAX is. The rules are in eager/autocast.py."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

_library: torch.library.Library | None = None


class _Default(threading.local):
    set = False


_default = _Default()


def install() -> None:
    """Lets every operator without a rule pass, and makes bfloat16 the default dtype. PyTorch's default for a Python
    backend is float16, kept by thread (torch 2.13)."""
    global _library
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    torch.set_autocast_dtype("tpu", torch.bfloat16)
    _default.set = True
    theirs = torch.autocast.__init__

    @functools.wraps(theirs)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "tpu" and not _default.set:
            _default.set = True
            torch.set_autocast_dtype("tpu", torch.bfloat16)
        theirs(self, device_type, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
