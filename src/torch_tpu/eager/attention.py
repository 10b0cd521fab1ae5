"""scaled_dot_product_attention as one operator, `tpu::sdpa`, in eager mode and in traced graphs.

PyTorch would decompose it into a dozen operators; XLA does it better whole, and the backward needs only the
logarithms of the softmax denominators, not the probabilities.
"""

from __future__ import annotations

from typing import Any

import torch

from . import transforms

Tensor = torch.Tensor

_tpu = torch.library.Library("tpu", "FRAGMENT")
_aten = torch.library.Library("aten", "IMPL")

# keep: which probabilities survive dropout. grad_mask of the backward is empty when not asked for.
_tpu.define("sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? keep, float dropout_p, "
            "bool is_causal, float scale) -> (Tensor output, Tensor logsumexp)")
_tpu.define("sdpa_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, "
            "Tensor? attn_mask, Tensor? keep, float dropout_p, bool is_causal, float scale, bool grad_mask) "
            "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask)")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _meta(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, keep: Tensor | None, dropout_p: float,
          is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return (query.new_empty((*query.shape[:-1], value.shape[-1])),
            query.new_empty(query.shape[:-1], dtype=_wide(query.dtype)))


def _meta_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
                   attn_mask: Tensor | None, keep: Tensor | None, dropout_p: float, is_causal: bool, scale: float,
                   grad_mask: bool) -> tuple[Tensor, ...]:
    mask = attn_mask.new_empty(attn_mask.shape) if grad_mask and attn_mask is not None else query.new_empty((0,))
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), mask


_tpu.impl("sdpa", _meta, "Meta")
_tpu.impl("sdpa_backward", _meta_backward, "Meta")


def plain(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, keep: Tensor | None, dropout_p: float,
          is_causal: bool, scale: float) -> Tensor:
    """The same in PyTorch's own operators, each of which can be differentiated as often as wished."""
    if query.dim() > 2:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    wide = _wide(query.dtype)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    if is_causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    probabilities = torch._safe_softmax(scores, -1)
    if keep is not None:
        probabilities = probabilities * keep / (1 - dropout_p)
    return (probabilities @ value.to(wide)).to(query.dtype)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, attn_mask, keep, ctx.dropout_p, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, attn_mask, keep)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
    if grad is None:
        return (None,) * 8
    query, key, value, output, logsumexp, attn_mask, keep = ctx.saved_tensors
    grads = torch.ops.tpu.sdpa_backward(grad, query, key, value, output, logsumexp, attn_mask, keep, ctx.dropout_p,
                                        ctx.is_causal, ctx.scale, bool(ctx.needs_input_grad[3]))
    return (*grads[:3], grads[3] if ctx.needs_input_grad[3] else None, None, None, None, None)


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    grad, query, key, value, _, _, attn_mask, keep, ctx.dropout_p, ctx.is_causal, ctx.scale, ctx.grad_mask = inputs
    ctx.save_for_backward(grad, query, key, value, attn_mask, keep)


def _double_backward(ctx: Any, *cotangents: Tensor) -> Any:
    grad, query, key, value, attn_mask, keep = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        if ctx.grad_mask:
            attn_mask = attn_mask.detach().requires_grad_()
            leaves.append(attn_mask)
        upstream = grad.detach().requires_grad_()
        output = plain(leaves[0], leaves[1], leaves[2], attn_mask, keep, ctx.dropout_p, ctx.is_causal, ctx.scale)
        first = torch.autograd.grad(output, leaves, upstream, create_graph=True)
    second = torch.autograd.grad(first, [upstream, *leaves], cotangents[:len(leaves)], allow_unused=True)
    return (*second[:4], None, None, second[4] if ctx.grad_mask else None, None, None, None, None, None)


torch.library.register_autograd("tpu::sdpa", _backward, setup_context=_save, lib=_tpu)
torch.library.register_autograd("tpu::sdpa_backward", _double_backward, setup_context=_save_backward, lib=_tpu)


def _validate(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float) -> None:
    """PyTorch's own checks, in its words."""
    if query.dtype != key.dtype or query.dtype != value.dtype:
        raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got query.dtype: {query.dtype} "
                           f"key.dtype: {key.dtype} and value.dtype: {value.dtype} instead.")
    for tensor in (key, value) if attn_mask is None else (key, value, attn_mask):
        if tensor.device != query.device:
            raise RuntimeError(f"Expected query, key, value and attn_mask to have the same device type, but got "
                               f"{query.device} and {tensor.device}")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(f"Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
                           f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead.")
    if not query.is_floating_point():
        raise RuntimeError(f"scaled_dot_product_attention expects floating point tensors, got {query.dtype}")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(f"Expected attn_mask dtype to be bool or float or to match query dtype, but got "
                           f"attn_mask.dtype: {attn_mask.dtype} and  query.dtype: {query.dtype} instead.")
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(f"scaled_dot_product_attention: query {list(query.shape)}, key {list(key.shape)} and value "
                           f"{list(value.shape)} do not fit together")


def _common_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with one number of heads that divides the query's. No copy where they agree already."""
    heads, of_key, of_value = query.shape[-3], key.shape[-3], value.shape[-3]
    if heads % of_key or heads % of_value:
        raise RuntimeError("Number of heads in key and value must divide the number of heads in query")
    if of_key != of_value:
        key, value = key.repeat_interleave(heads // of_key, -3), value.repeat_interleave(heads // of_value, -3)
    return key, value


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
                                 enable_gqa: bool = False) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention for tensors on tpu, with its rules and errors."""
    _validate(query, key, value, attn_mask, dropout_p)
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    keep_heads = 1 if enable_gqa and min(query.dim(), key.dim(), value.dim()) >= 3 else 0
    if keep_heads:
        key, value = _common_heads(query, key, value)
    leads = [t.shape[:t.dim() - 2 - keep_heads] for t in (query, key, value)]
    if not leads[0] == leads[1] == leads[2]:
        lead = torch.broadcast_shapes(*leads)
        query, key, value = (t.expand(*lead, *t.shape[t.dim() - 2 - keep_heads:]) for t in (query, key, value))
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    if attn_mask is not None:
        torch.broadcast_shapes(attn_mask.shape, (*query.shape[:-1], key.shape[-2]))
    keep = None
    if dropout_p > 0:
        shape = (*query.shape[:-1], key.shape[-2])
        keep = query.new_empty(shape, dtype=torch.bool).bernoulli_(1 - dropout_p)
    if transforms.active(query, key, value, attn_mask):
        return plain(query, key, value, attn_mask, keep, dropout_p, is_causal, scale)
    return torch.ops.tpu.sdpa(query, key, value, attn_mask, keep, dropout_p, is_causal, scale)[0]


_aten.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")
_aten.impl("scaled_dot_product_attention", scaled_dot_product_attention, "PrivateUse1")
