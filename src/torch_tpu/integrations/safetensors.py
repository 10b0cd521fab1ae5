"""safetensors (tried on 0.8.0): its own code knows a fixed list of devices. With device="tpu", tensors are read on the
host, one at a time, and put on the device."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from . import on_import


def install() -> None:
    on_import.after("safetensors", _open_on_tpu)


class _Slice:
    """A tensor of the file, of which parts are taken."""

    def __init__(self, part: Any, device: torch.device) -> None:
        self._part, self._device = part, device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._part[index].to(self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _File:
    """An open file whose tensors go to the device."""

    def __init__(self, file: Any, device: torch.device) -> None:
        self._file, self._device = file, device

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> Any:
        return self._file.__exit__(*exception)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118  (not a dict)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _open_on_tpu(module: ModuleType) -> None:
    theirs = module.safe_open

    class safe_open:
        __doc__ = theirs.__doc__
        __module__ = "safetensors"

        def __new__(cls, filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
            if framework in ("pt", "torch", "pytorch") and not isinstance(device, int) \
                    and str(device).partition(":")[0] == "tpu":
                return _File(theirs(filename, framework=framework, device="cpu", **kwargs), torch.device(device))
            return theirs(filename, framework=framework, device=device, **kwargs)

    for name in ("safetensors", "safetensors.torch"):
        if name in sys.modules and getattr(sys.modules[name], "safe_open", None) is theirs:
            sys.modules[name].safe_open = safe_open  # type: ignore[attr-defined]
    module.safe_open = safe_open  # type: ignore[attr-defined]
