"""Another spelling that published kernels import: torch_tpu._internal.pallas.pallas."""

from ...custom.definition import JaxOp, jax_op

__all__ = ["JaxOp", "jax_op"]
