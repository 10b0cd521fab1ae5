"""ATen operators as JAX functions, one file a family. Start with table.py, then promotion.py."""

from __future__ import annotations

import importlib

FAMILIES = ("creation", "pointwise", "special", "bessel", "orthogonal", "compare", "activation", "reduce", "scan",
            "sort", "random", "loss", "foreach", "optimizer", "index", "scatter", "view", "shape", "embedding",
            "padding", "segment", "matmul", "grouped_matmul", "norm", "batch_norm", "conv", "pool", "adaptive_pool",
            "attention", "interpolate", "grid_sample", "linalg", "fft", "rnn", "quantized")


def load() -> None:
    """Imports every family, which fills the table."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
