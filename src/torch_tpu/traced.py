"""Functions that stand in for PyTorch's and that Dynamo must trace. (It skips every other module of this package.)"""

from __future__ import annotations

from typing import Any

from torch.nn.attention import flex_attention

_validate_device = flex_attention._validate_device


def validate_device(query: Any, key: Any, value: Any) -> None:
    """flex_attention's check of the device (torch 2.13: a fixed list), which lets tpu through."""
    if query.device.type != "tpu":
        _validate_device(query, key, value)
