"""Convolutions of 1 to 3 spatial dimensions, transposed ones, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from . import context
from .promotion import cast
from .table import lowering


def _numbers(rank):
    spatial = "DHW"[-rank:] if rank <= 3 else None
    if spatial is None:
        raise NotImplementedError(f"convolution over {rank} spatial dimensions")
    return "NC" + spatial, "OI" + spatial, "NC" + spatial


def _each(values, rank):
    values = tuple(values)
    return values * rank if len(values) == 1 else values


def convolve(input, weight, stride, padding, dilation, transposed, output_padding, groups, out=None):
    """The convolution without its bias, in the type `out` (by default the input's)."""
    rank = input.ndim - 2
    stride, padding, dilation, output_padding = (
        _each(v, rank) for v in (stride, padding, dilation, output_padding))
    precision = context.precision() if input.dtype == jnp.float32 else None
    settings = {"rhs_dilation": dilation, "dimension_numbers": _numbers(rank), "feature_group_count": groups,
                "precision": precision, "preferred_element_type": out}
    if not transposed:
        return lax.conv_general_dilated(input, weight, stride, [(p, p) for p in padding], **settings)
    kernel = weight.shape[2:]
    # (Cin, Cout/groups, ...) -> (Cout, Cin/groups, ...), mirrored: the gradient of a convolution is a convolution.
    swapped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
    swapped = swapped.reshape(-1, weight.shape[0] // groups, *kernel)
    swapped = jnp.flip(swapped, tuple(range(2, 2 + rank)))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding)]
    return lax.conv_general_dilated(input, swapped, (1,) * rank, pads, lhs_dilation=stride, **settings)


def _through_float32(dtype):
    """XLA:CPU would accumulate float16 in float16."""
    return jnp.dtype(dtype) == jnp.float16


@lowering("aten.convolution.default", "aten.convolution_overrideable.default")
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    dtype = input.dtype
    if _through_float32(dtype):
        input, weight = input.astype(jnp.float32), weight.astype(jnp.float32)
    out = convolve(input, weight, stride, padding, dilation, transposed, output_padding, groups,
                   jnp.float32 if dtype == jnp.bfloat16 else None)
    if bias is not None:
        out = out + cast(bias, out.dtype).reshape((1, -1) + (1,) * (out.ndim - 2))
    return out.astype(dtype)


def _backward(grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask):
    dtype = input.dtype
    bias_grad = None
    if output_mask[2]:
        axes = (0, *range(2, grad_output.ndim))
        bias_grad = jnp.sum(grad_output, axes, dtype=jnp.float32 if dtype.itemsize < 4 else None).astype(dtype)
    if _through_float32(dtype):
        grad_output, input, weight = (v.astype(jnp.float32) for v in (grad_output, input, weight))
    grads = [None, None]
    for position, wanted in enumerate(output_mask[:2]):
        if wanted:
            def forward(value, position=position):
                pair = (value, weight) if position == 0 else (input, value)
                return convolve(*pair, stride, padding, dilation, transposed, output_padding, groups)

            _, pull = jax.vjp(forward, (input, weight)[position])
            grads[position] = pull(grad_output.astype(input.dtype))[0].astype(dtype)
    return grads[0], grads[1], bias_grad


@lowering("aten.convolution_backward_overrideable.default")
def convolution_backward_overrideable(grad_output, input, weight, stride, padding, dilation, transposed,
                                      output_padding, groups, output_mask):
    return _backward(grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups,
                     output_mask)


@lowering("aten.convolution_backward.default")
def convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
                         groups, output_mask):
    return _backward(grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups,
                     output_mask)
