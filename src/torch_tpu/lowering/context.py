"""What lowerings depend on besides their arguments: PyTorch's global numeric settings. Part of every cache key."""

from __future__ import annotations

import torch
from jax import lax

_PRECISION = {"highest": lax.Precision.HIGHEST, "high": lax.Precision.HIGH, "medium": lax.Precision.DEFAULT}


def key() -> tuple[object, ...]:
    """The settings as a hashable value."""
    return torch.get_float32_matmul_precision(), torch.get_default_dtype()


class Consulted:
    """How often the precision was asked for: whether a program depends on it."""

    count = 0


def precision() -> lax.Precision:
    """Precision of float32 matmul and convolution, as set by torch.set_float32_matmul_precision."""
    Consulted.count += 1
    return _PRECISION[torch.get_float32_matmul_precision()]
