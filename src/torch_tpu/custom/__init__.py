"""JAX and Pallas functions as torch operators: torch.tpu.pallas. Read definition.py, then operator.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .definition import JaxOp, jax_op

__all__ = ["JaxOp", "jax_op"]


def __getattr__(name: str) -> Any:
    """What the package has, imported at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'torch.tpu.pallas' has no attribute {name!r}; it has {', '.join(__all__)}")
    from . import definition

    return getattr(definition, name)
