"""DistributedDataParallel (torch 2.13).

With find_unused_parameters=True, Trainer's default, its C++ reducer makes a pinned CPU tensor with empty_like and
insists that it says it is pinned. A Python backend has no allocator for pinned memory,
and PJRT needs none, so from the first such module on an ordinary tensor may call itself pinned.

Only then, because it puts a Python kernel under the CPU's empty_strided (20 microseconds at each clone or zeros_like).

In a compiled step the reducer's buckets are put into their final order, which the ranks agree on, outside of it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ..distributed import captured
from .torch_tensor import call_pinned, other_accelerator

_library: torch.library.Library | None = None


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, layout: Any = None,
                   device: Any = None, pin_memory: bool | None = None) -> torch.Tensor:
    span = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride))
    made = torch.empty(span, dtype=dtype, device="cpu").as_strided(size, stride)
    return call_pinned(made) if pin_memory else made


def allow_pinned() -> None:
    """Lets torch.empty_like and torch.empty_strided take pin_memory=True on the CPU, in ordinary memory (once)."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that the CPU has this kernel already
        _library.impl("empty_strided", _empty_strided, "CPU", allow_override=True)


def install() -> None:
    if other_accelerator():
        return
    kind = torch.nn.parallel.DistributedDataParallel
    theirs = kind.__init__

    @functools.wraps(theirs)
    def init(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        wanted = inspect.signature(theirs).bind(self, module, *args, **kwargs).arguments
        if wanted.get("find_unused_parameters") and any(p.device.type == "tpu" for p in module.parameters()):
            allow_pinned()
        theirs(self, module, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    before = kind._pre_forward

    @functools.wraps(before)
    def pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if captured.on() and torch.is_grad_enabled():
            with captured.outside():
                self.reducer._rebuild_buckets()
        return before(self, *inputs, **kwargs)

    kind._pre_forward = pre_forward  # type: ignore[method-assign]
