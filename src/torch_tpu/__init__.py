"""PyTorch on Google TPUs. `import torch` alone makes the device appear; importing this package does the same."""

from __future__ import annotations

from ._autoload import load as _load

__version__ = "0.1.0"

_load()
