"""A decoder written by hand in JAX, as the bar for the compiled path: Llama and Qwen3 (RMS norm, rotary positions,
grouped-query attention over a static cache, SwiGLU), batch 1, greedy.

Weights keep torch's layout [out, in]. The cache of each layer is a pair of [heads, length, head_dim].
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch


def weights(model: torch.nn.Module) -> dict[str, Any]:
    """A Transformers model's parameters as JAX arrays, by name."""
    def array(value: torch.Tensor) -> jax.Array:
        return jnp.asarray(value.detach().float().numpy()).astype(str(value.dtype).removeprefix("torch."))

    return {name: array(value) for name, value in model.state_dict().items() if name != "lm_head.weight"}


def empty_cache(config: Any, length: int, dtype: Any) -> list[tuple[jax.Array, jax.Array]]:
    shape = (config.num_key_value_heads, length, config.head_dim)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_hidden_layers)]


def _norm(x: Any, weight: Any, eps: float) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    low, high = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-high, low], -1) * sin


def forward(config: Any, p: dict[str, Any], ids: jax.Array, start: jax.Array,
            cache: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """ids [T] at positions start.. -> the next token (int32 scalar) and the cache."""
    tokens, dim = ids.shape[0], config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    eps = config.rms_norm_eps
    x = p["model.embed_tokens.weight"][ids]
    at = start + jnp.arange(tokens)
    frequency = 1.0 / config.rope_parameters["rope_theta"] ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.concatenate([at[:, None] * frequency] * 2, -1)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    visible = jnp.arange(cache[0][0].shape[1])[None] <= at[:, None]
    bias = jnp.where(visible, 0.0, -jnp.inf).astype(jnp.float32)
    updated = []
    for layer, (keys, values) in enumerate(cache):
        def w(name: str, layer: int = layer) -> Any:
            return p[f"model.layers.{layer}.{name}.weight"]

        h = _norm(x, w("input_layernorm"), eps)
        q = (h @ w("self_attn.q_proj").T).reshape(tokens, heads, dim)
        k = (h @ w("self_attn.k_proj").T).reshape(tokens, groups, dim)
        v = (h @ w("self_attn.v_proj").T).reshape(tokens, groups, dim)
        if "model.layers.0.self_attn.q_norm.weight" in p:
            q, k = _norm(q, w("self_attn.q_norm"), eps), _norm(k, w("self_attn.k_norm"), eps)
        q = _rotate(q.transpose(1, 0, 2), cos, sin)
        k = _rotate(k.transpose(1, 0, 2), cos, sin)
        keys = jax.lax.dynamic_update_slice(keys, k, (0, start, 0))
        values = jax.lax.dynamic_update_slice(values, v.transpose(1, 0, 2), (0, start, 0))
        updated.append((keys, values))
        q = q.reshape(groups, heads // groups * tokens, dim)
        score = jnp.einsum("gqd,gkd->gqk", q, keys, preferred_element_type=jnp.float32) * dim ** -0.5
        score = score.reshape(groups, heads // groups, tokens, -1) + bias
        weight = jax.nn.softmax(score, -1).astype(x.dtype).reshape(groups, heads // groups * tokens, -1)
        mixed = jnp.einsum("gqk,gkd->gqd", weight, values).reshape(heads, tokens, dim)
        x = x + mixed.transpose(1, 0, 2).reshape(tokens, heads * dim) @ w("self_attn.o_proj").T
        h = _norm(x, w("post_attention_layernorm"), eps)
        x = x + (jax.nn.silu(h @ w("mlp.gate_proj").T) * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    last = _norm(x[-1], p["model.norm.weight"], eps)
    logits = p["model.embed_tokens.weight"] @ last
    return jnp.argmax(logits).astype(jnp.int32), updated


def compiled(config: Any) -> Any:
    """`forward` jitted, the cache donated; one program for each number of tokens."""
    return jax.jit(functools.partial(forward, config), donate_argnums=(3,))
