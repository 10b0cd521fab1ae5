"""torch_tpu._internal.pallas, as kernels of the Hub import it: `from torch_tpu._internal.pallas import jax_op`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...custom import JaxOp, jax_op

__all__ = ["JaxOp", "jax_op"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ... import custom

    return getattr(custom, name)
