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


def _causal_logits(config: Any, p: dict[str, Any], ids: jax.Array) -> jax.Array:
    """ids [B, T] -> float32 logits [B, T, vocabulary] without a cache."""
    batch, tokens = ids.shape
    heads, groups, dim, eps = (config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                               config.rms_norm_eps)
    x = p["model.embed_tokens.weight"][ids]
    at = jnp.arange(tokens)
    frequency = 1.0 / config.rope_parameters["rope_theta"] ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.concatenate([at[:, None] * frequency] * 2, -1)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    visible = at[None] <= at[:, None]
    for layer in range(config.num_hidden_layers):
        def w(name: str, layer: int = layer) -> Any:
            return p[f"model.layers.{layer}.{name}.weight"]

        def projected(h: Any, name: str, count: int, w: Any = w) -> Any:
            return (h @ w(f"self_attn.{name}_proj").T).reshape(batch, tokens, count, dim)

        h = _norm(x, w("input_layernorm"), eps)
        q, k, v = projected(h, "q", heads), projected(h, "k", groups), projected(h, "v", groups)
        if "model.layers.0.self_attn.q_norm.weight" in p:
            q, k = _norm(q, w("self_attn.q_norm"), eps), _norm(k, w("self_attn.k_norm"), eps)
        q, k = _rotate(q, cos[:, None], sin[:, None]), _rotate(k, cos[:, None], sin[:, None])
        q = q.reshape(batch, tokens, groups, heads // groups, dim)
        score = jnp.einsum("btghd,bsgd->bghts", q, k, preferred_element_type=jnp.float32) * dim ** -0.5
        weight = jax.nn.softmax(jnp.where(visible, score, -jnp.inf), -1).astype(x.dtype)
        mixed = jnp.einsum("bghts,bsgd->btghd", weight, v).reshape(batch, tokens, heads * dim)
        x = x + mixed @ w("self_attn.o_proj").T
        h = _norm(x, w("post_attention_layernorm"), eps)
        x = x + (jax.nn.silu(h @ w("mlp.gate_proj").T) * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    return (_norm(x, p["model.norm.weight"], eps) @ p["model.embed_tokens.weight"].T).astype(jnp.float32)


def training_step(config: Any, p: dict[str, Any], first: dict[str, Any], second: dict[str, Any], count: jax.Array,
                  ids: jax.Array) -> tuple[jax.Array, dict[str, Any], dict[str, Any], dict[str, Any], jax.Array]:
    """Loss of the next tokens of ids [B, T], its gradients, and an update by AdamW (torch's defaults; moments `first`
    and `second` of the parameters' dtype, the arithmetic in float32)."""
    def loss(p: dict[str, Any]) -> jax.Array:
        logits = _causal_logits(config, p, ids)[:, :-1]
        right = jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)

    value, gradients = jax.value_and_grad(loss)(p)
    count = count + 1
    rate, decay, beta1, beta2, eps = 1e-3, 1e-2, 0.9, 0.999, 1e-8
    updated: tuple[dict[str, Any], ...] = ({}, {}, {})
    for name, weight in p.items():
        g, m, s, x = (each.astype(jnp.float32) for each in (gradients[name], first[name], second[name], weight))
        m, s = beta1 * m + (1 - beta1) * g, beta2 * s + (1 - beta2) * g * g
        root = jnp.sqrt(s) / jnp.sqrt(1 - beta2 ** count) + eps
        x = x * (1 - rate * decay) - rate / (1 - beta1 ** count) * m / root
        for kept, new in zip(updated, (x, m, s)):
            kept[name] = new.astype(weight.dtype)
    return value, *updated, count


def compiled(config: Any) -> Any:
    """`forward` jitted, the cache donated; one program for each number of tokens."""
    return jax.jit(functools.partial(forward, config), donate_argnums=(3,))
