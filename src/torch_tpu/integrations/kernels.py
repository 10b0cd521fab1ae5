"""Kernels of the Hub in Transformers (tried on 5.22.2 to 5.25.0, kernels 0.17.2): says why `use_kernels=True` does
nothing, where it does nothing. The `kernels` library itself knows the device, and needs no adaptation."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from types import ModuleType
from typing import Any

from . import on_import


def install() -> None:
    on_import.after("transformers.modeling_utils", _use_kernels)


def versions() -> str:
    """Which version of `kernels` is installed and which the installed Transformers takes; "" where they fit, or where
    one of them is missing."""
    try:
        installed = importlib.metadata.version("kernels")
        transformers = importlib.metadata.version("transformers")
        from transformers.utils import import_utils
    except (importlib.metadata.PackageNotFoundError, ImportError):
        return ""
    if import_utils.is_kernels_available():
        return ""
    least, below = getattr(import_utils, "KERNELS_MIN_VERSION", "?"), getattr(import_utils, "KERNELS_MAX_VERSION", "?")
    return (f"kernels {installed} is installed and Transformers {transformers} takes {least} <= version < {below}; "
            f"install one that fits (pip install 'kernels>={least},<{below}'), or with kernels 0.17 Transformers 5.20 "
            "to 5.22 (pip install 'transformers>=5.20,<5.23')")


def _replaced(model: Any) -> int:
    """How many modules run another forward than their class's."""
    return sum("forward" in vars(module) and getattr(module.forward, "__func__", None) is not type(module).forward
               for module in model.modules())


def _use_kernels(module: ModuleType) -> None:
    model = module.PreTrainedModel
    theirs = model.set_use_kernels
    by_default = hasattr(module, "_kernels_enabled")  # from 5.25, where from_pretrained switches kernels on unasked

    @functools.wraps(theirs)
    def set_use_kernels(self: Any, use_kernels: bool, *args: Any, **kwargs: Any) -> Any:
        if use_kernels and (problem := versions()):
            without = "; USE_HUB_KERNELS=0 in the environment does without kernels" if by_default else ""
            raise ValueError(f"use_kernels=True: {problem}{without}")
        result = theirs(self, use_kernels, *args, **kwargs)
        asked = use_kernels and (not by_default or kwargs.get("kernel_config", args[0] if args else None) is not None)
        if asked and self.device.type == "tpu" and not _replaced(self):
            warnings.warn(
                f"use_kernels=True changed no layer of {type(self).__name__}: no kernel is mapped to its layers for "
                "device 'tpu' (Transformers' own mapping has none; XLA fuses these layers). Map yours by KernelConfig "
                "or kernels.register_kernel_mapping, see docs/kernels.md.", UserWarning, stacklevel=2)
        return result

    model.set_use_kernels = set_use_kernels
