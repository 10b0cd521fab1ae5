"""Weight normalisation: w = g * v / ||v||, the norm over every dimension but one."""

from __future__ import annotations

import jax.numpy as jnp

from .promotion import cast, wide
from .table import lowering


def _others(v, dim):
    return tuple(d for d in range(v.ndim) if d != dim % v.ndim)


@lowering("aten._weight_norm_interface.default")
def weight_norm(v, g, dim=0):
    x = wide(v)
    norms = jnp.sqrt(jnp.sum(x * x, _others(v, dim), keepdims=True))
    return (x * (wide(g) / norms)).astype(v.dtype), norms


@lowering("aten._weight_norm_interface_backward.default")
def weight_norm_backward(grad_w, saved_v, saved_g, saved_norms, dim):
    grad, v, g = wide(grad_w), wide(saved_v), wide(saved_g)
    norms = cast(saved_norms, v.dtype)
    along = jnp.sum(grad * v, _others(v, dim), keepdims=True)
    dv = g / norms * (grad - v * (along / (norms * norms)))
    return dv.astype(saved_v.dtype), (along / norms).astype(saved_g.dtype)
