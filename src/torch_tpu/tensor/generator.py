"""torch.Generator(device="tpu"). PyTorch (2.13) makes no generator for a Python backend, so ours is a CPU generator
that reports another device: random operators draw a key from it on the host and sample on the chip.

`torch.Generator` itself becomes a class that makes either kind; the generators of other devices stay PyTorch's own
objects, of PyTorch's own type.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

_Native = torch._C.Generator
_ours: set[int] = set()  # addresses: operators are handed another Python object for the same generator


class DeviceGenerator(_Native):
    """A source of random numbers for tpu:0."""

    def __new__(cls) -> DeviceGenerator:
        made = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        _ours.add(made._cdata)  # type: ignore[attr-defined]
        weakref.finalize(made, _ours.discard, made._cdata)  # type: ignore[attr-defined]
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("tpu", 0)

    def clone_state(self) -> DeviceGenerator:
        return _restore(self.get_state())

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.get_state(),)


def _restore(state: torch.Tensor) -> DeviceGenerator:
    made = DeviceGenerator()
    made.set_state(state)
    return made


class _Factory(type(_Native)):  # type: ignore[misc]
    """Decides by the device which class of generator is made; every generator is an instance of torch.Generator."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Generator:
            return super().__call__(*args, **kwargs)
        device = args[0] if args else kwargs.get("device")
        if len(args) + len(kwargs) == 1 and device is not None and _is_tpu(device):
            return DeviceGenerator()
        return _Native(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Native) if cls is Generator else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Native) if cls is Generator else super().__subclasscheck__(subclass)


def _is_tpu(device: Any) -> bool:
    device = torch.device(device)
    if device.type != "tpu":
        return False
    from ..runtime import chips

    chips.check(device)
    return True


class Generator(_Native, metaclass=_Factory):
    __doc__ = _Native.__doc__
    __module__ = "torch"


_lock = threading.Lock()
_default: DeviceGenerator | None = None


def default() -> DeviceGenerator:
    """The device's own generator; seeded as the CPU's was, until torch.manual_seed is called."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                made = DeviceGenerator()
                made.manual_seed(torch.initial_seed())
                _default = made
    return _default


def expect_ours(generator: torch.Generator) -> None:
    """Raises torch's error for a generator of another device."""
    if generator._cdata not in _ours:  # type: ignore[attr-defined]
        raise RuntimeError(f"Expected a 'tpu' device type for generator but found '{generator.device.type}'; make it "
                           "with torch.Generator(device='tpu')")


def install() -> None:
    torch.Generator = Generator  # type: ignore[misc,assignment]
