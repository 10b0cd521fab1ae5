"""Small matters of torch.Tensor: printing, pinned memory, and DLPack (torch 2.13)."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch

_library: torch.library.Library | None = None


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy for printing: of the whole storage where it is small, so that no program is compiled for a view."""
    from ..eager import copy
    from ..tensor import buffer

    plain = buffer.of(tensor) is not None and not tensor.is_conj() and not tensor.is_neg()
    if plain and tensor.untyped_storage().nbytes() <= 1 << 26:
        return copy.to_host(tensor.detach())
    return tensor.detach().cpu()


def _print_on_host() -> None:
    """PyTorch takes a tensor apart to print it, and copies to the CPU first only for devices of a fixed list."""
    module = torch._tensor_str
    theirs = module._tensor_str

    @functools.wraps(theirs)
    def _tensor_str(self: torch.Tensor, indent: int) -> str:
        return theirs(_host(self) if self.device.type == "tpu" else self, indent)

    module._tensor_str = _tensor_str


def other_accelerator() -> bool:
    """Whether this host has another accelerator whose transfers pinning serves."""
    return bool((torch.version.cuda and os.path.exists("/dev/nvidiactl"))
                or (torch.version.hip and os.path.exists("/dev/kfd")) or torch.version.xpu)


def call_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory says from now on that it is pinned."""
    tensor.untyped_storage()._tpu_pinned = True  # type: ignore[attr-defined]
    return tensor


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy, as elsewhere, but in ordinary memory: PJRT needs no pinned memory. It says that it is pinned, since
    FSDP2's CPU offload would otherwise pin it again, and lose track of it."""
    return call_pinned(tensor.detach().clone())


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return getattr(tensor.untyped_storage(), "_tpu_pinned", False)


def _pin_nothing() -> None:
    global _library
    if not other_accelerator():
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("_pin_memory", _pin_memory, "CPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says that the CPU has this kernel already
            _library.impl("is_pinned", _is_pinned, "CPU", allow_override=True)


def _refuse_dlpack() -> None:
    """A capsule of a tpu tensor would hold an address that nobody can read."""
    theirs, theirs_device = torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__

    def refuse(tensor: torch.Tensor) -> None:
        if tensor.device.type == "tpu":
            raise BufferError("a tpu tensor cannot be handed on by DLPack: use torch_tpu.to_jax(t), which shares its "
                              "memory with JAX, or t.cpu()")

    @functools.wraps(theirs)
    def __dlpack__(self: torch.Tensor, **kwargs: Any) -> Any:
        refuse(self)
        return theirs(self, **kwargs)

    @functools.wraps(theirs_device)
    def __dlpack_device__(self: torch.Tensor) -> Any:
        refuse(self)
        return theirs_device(self)

    torch.Tensor.__dlpack__ = __dlpack__  # type: ignore[method-assign]
    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]


def install() -> None:
    _print_on_host()
    _pin_nothing()
    _refuse_dlpack()
