"""PyTorch on Google TPUs. `import torch` alone makes the device appear; importing this package does the same."""

from __future__ import annotations

from typing import Any

from ._autoload import load as _load

__version__ = "0.1.0"
__all__ = ["TpuQuantConfig", "from_jax", "quantize", "to_jax"]

_load()


def __getattr__(name: str) -> Any:
    """What is imported at its first use: importing this package does not import JAX."""
    if name == "quantize":
        from .quantization import quantize

        return quantize
    if name == "TpuQuantConfig":
        from .integrations import transformers_quantization

        return transformers_quantization.config_class()
    if name in __all__:
        from .tensor import bridge

        return getattr(bridge, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
