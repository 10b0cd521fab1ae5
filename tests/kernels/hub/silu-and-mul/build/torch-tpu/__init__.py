"""silu(x) * y in Pallas, forward and backward, in the layout of the Hub's kernels."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from torch_tpu._internal.pallas import jax_op

BLOCK = 2**18  # elements of an array that are on the chip at once


def _forward(x_ref, y_ref, out_ref):
    x = x_ref[...].astype(jnp.float32)
    out_ref[...] = (x * jax.nn.sigmoid(x) * y_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


def _backward(x_ref, y_ref, grad_ref, dx_ref, dy_ref):
    x, y, grad = (ref[...].astype(jnp.float32) for ref in (x_ref, y_ref, grad_ref))
    gate = jax.nn.sigmoid(x)
    dx_ref[...] = (grad * y * gate * (1 + x * (1 - gate))).astype(dx_ref.dtype)
    dy_ref[...] = (grad * x * gate).astype(dy_ref.dtype)


def _by_rows(kernel, results, *arrays):
    """The kernel over blocks of rows, whole in their width."""
    rows, width = arrays[0].shape
    tall = min(rows, max(16, BLOCK // width // 16 * 16))
    block = pl.BlockSpec((tall, width), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((rows, width), arrays[0].dtype)
    return pl.pallas_call(kernel, out_shape=[shape] * results, grid=(pl.cdiv(rows, tall),),
                          in_specs=[block] * len(arrays), out_specs=[block] * results)(*arrays)


@jax.custom_vjp
def _silu_and_mul(x, y):
    return _by_rows(_forward, 1, x, y)[0]


_silu_and_mul.defvjp(lambda x, y: (_silu_and_mul(x, y), (x, y)),
                     lambda kept, grad: tuple(_by_rows(_backward, 2, *kept, grad)))


@jax_op("silu_and_mul_tpu::silu_and_mul")
def silu_and_mul(x: jax.Array, y: jax.Array) -> jax.Array:
    flat = (-1, x.shape[-1])
    return _silu_and_mul(x.reshape(flat), y.reshape(flat)).reshape(x.shape)


from . import layers  # noqa: E402  (they use the operator)

__all__ = ["layers", "silu_and_mul"]
