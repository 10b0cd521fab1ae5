"""Keys for random operators: drawn on the host from a generator's state, used on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..runtime import transfer
from ..tensor import generator as device_generator


def default_generator() -> torch.Generator:
    """The device's own generator."""
    return device_generator.default()


def draw(generator: torch.Generator | None = None, count: int = 1) -> np.ndarray:
    """`count` keys as uint32[count, 2]; advances the generator (the device's own when none is given).

    Raises:
        RuntimeError: it is a generator of another device.
    """
    if generator is None:
        source: torch.Generator = device_generator.default()
    else:
        device_generator.expect_ours(generator)
        source = generator
    words = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=source)
    return words.numpy().view(np.uint32).reshape(count, 2)


def next_key(generator: torch.Generator | None = None) -> Any:
    """One key, on the device."""
    return transfer.host_value(draw(generator)[0])
