"""ATen operators as JAX functions, one file a family. Start with table.py, then promotion.py."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Imports every file of this folder, which fills the table. A new family is a new file, and nothing else."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        importlib.import_module(f"{__name__}.{module.name}")
