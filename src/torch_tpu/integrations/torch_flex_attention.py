"""torch.nn.attention.flex_attention takes devices from a fixed list (torch 2.13); tpu is let through."""

from __future__ import annotations

from types import ModuleType

from . import on_import


def _adapt(module: ModuleType) -> None:
    if hasattr(module, "_validate_device"):
        from .. import traced

        module._validate_device = traced.validate_device  # type: ignore[attr-defined]


def install() -> None:
    on_import.after("torch.nn.attention.flex_attention", _adapt)
