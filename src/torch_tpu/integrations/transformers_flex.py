"""Transformers (tried on 5.24.0) takes flex_attention for missing wherever the host has a TPU, since PyTorch refuses
its tensors; here it works."""

from __future__ import annotations

import functools
from types import ModuleType

from . import on_import


def _available(module: ModuleType) -> None:
    mark = getattr(module, "_make_compile_constant", None)
    if mark is None or not hasattr(module, "is_torch_flex_attn_available"):
        return  # another version of Transformers: it does what it does

    def is_torch_flex_attn_available() -> bool:
        return bool(module.is_torch_available())

    module.is_torch_flex_attn_available = functools.lru_cache(mark(is_torch_flex_attn_available))  # type: ignore


def install() -> None:
    on_import.after("transformers.utils.import_utils", _available)
