"""RMSNorm in JAX, in the layout of the Hub's kernels."""

import jax
import jax.numpy as jnp
from torch_tpu._internal.pallas import jax_op


@jax_op("rms_norm_tpu::rms_norm")
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


from . import layers  # noqa: E402  (they use the operator)

__all__ = ["layers", "rms_norm"]
