"""The inference fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer, from whole operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .kernels import kernel

Tensor = torch.Tensor


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _allowed(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """Which keys a query may see. These operators mark what is hidden: 0 names (L, L), 1 (B, L), 2 a full mask."""
    if mask is None:
        return None
    seen = mask.logical_not()
    return seen[:, None, None, :] if mask_type == 1 else seen


def _project(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    if query is key and key is value:
        return F.linear(query, weight, bias).chunk(3, -1)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weight.chunk(3), bias.chunk(3)))


@kernel("aten._native_multi_head_attention.default")
def native_multi_head_attention(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int,
                                qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
                                mask: Tensor | None = None, need_weights: bool = True,
                                average_attn_weights: bool = True,
                                mask_type: int | None = None) -> tuple[Tensor, Tensor | None]:
    q, k, v = (_heads(x, num_head) for x in _project(query, key, value, qkv_weight, qkv_bias))
    allowed = _allowed(mask, mask_type)
    weights = None
    if need_weights:
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        if allowed is not None:
            scores = scores.masked_fill(allowed.logical_not(), -torch.inf)
        weights = scores.softmax(-1)
        out = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


@kernel("aten._transformer_encoder_layer_fwd.default")
def transformer_encoder_layer(src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
                              proj_weight: Tensor, proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float,
                              norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
                              ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
                              mask: Tensor | None = None, mask_type: int | None = None) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias,
                                           mask, False, False, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else hidden.relu(), ffn_weight_2, ffn_bias_2)

    def first(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        src = src + attend(first(src))
        return src + feed(second(src))
    src = first(src + attend(src))
    return second(src + feed(src))


@kernel("aten._nested_tensor_from_mask_left_aligned.default")
def left_aligned(t: Tensor, mask: Tensor) -> bool:
    """nn.TransformerEncoder asks whether to turn a padded batch into nested tensors; rectangles suit XLA better."""
    return False
