"""Keys for random operators: drawn on the host from a generator's state, used on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..runtime import client, jax_door

_default: torch.Generator | None = None


def default_generator() -> torch.Generator:
    """The device's own generator. Its state is a CPU generator's; every random operator draws one key from it."""
    global _default
    if _default is None:
        _default = torch._C.Generator(torch.device("cpu"))
        _default.manual_seed(torch.initial_seed())
    return _default


def draw(generator: torch.Generator | None = None, count: int = 1) -> np.ndarray:
    """`count` keys as uint32[count, 2]; advances the generator."""
    source = generator if generator is not None else default_generator()
    words = torch.empty(count, dtype=torch.int64).random_(-(2**63), None, generator=source)
    return words.numpy().view(np.uint32).reshape(count, 2)


def next_key(generator: torch.Generator | None = None) -> Any:
    """One key, on the device."""
    return jax_door.put(draw(generator)[0], client.get().device)
