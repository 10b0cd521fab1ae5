"""Transformers (tried on 5.24.0): pipelines know every vendor's device but ours."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from . import on_import


def install() -> None:
    on_import.after("transformers.pipelines.base", _pipeline_device)


def _pipeline_device(module: ModuleType) -> None:
    pipeline = module.Pipeline
    theirs = pipeline.__init__

    @functools.wraps(theirs)
    def __init__(self: Any, model: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        placed = getattr(model, "hf_device_map", None)
        ordinal = isinstance(device, int) and not isinstance(device, bool) and device >= 0
        if not torch.cuda.is_available() and (ordinal or (device is None and placed is None)):
            device = torch.device("tpu", device or 0)
        elif device is None and placed is not None:  # theirs takes the first place, which may be "disk"
            device = next((place for place in placed.values() if place not in ("cpu", "disk")), "cpu")
        theirs(self, model, *args, device=device, **kwargs)

    pipeline.__init__ = __init__
