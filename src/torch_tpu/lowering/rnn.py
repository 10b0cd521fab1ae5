"""Recurrent layers as one scan over time, and PyTorch's fused cells.

Gates are stacked as PyTorch stacks them: LSTM input, forget, cell, output; GRU reset, update, new.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .matmul import dot
from .promotion import cast, wide
from .table import lowering


def _lstm(gates, c):
    i, f, g, o = jnp.split(gates, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(inputs, hidden, h):
    ri, zi, ni = jnp.split(inputs, 3, -1)
    rh, zh, nh = jnp.split(hidden, 3, -1)
    r, z = jax.nn.sigmoid(ri + rh), jax.nn.sigmoid(zi + zh)
    n = jnp.tanh(ni + r * nh)
    return n + z * (h - n)


def _linear(x, weight, bias):
    out = dot(x, weight, ((x.ndim - 1,), (1,)))
    return out if bias is None else out + cast(bias, out.dtype)


def _layer(mode, x, h, c, weights, lengths, reverse):
    """One direction of one layer: x (T, B, I), h (B, H), c (B, H) or None -> outputs, last h, last c."""
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    gates = _linear(x, w_ih, b_ih)
    states = (wide(h), None if c is None else wide(c))
    dtype = x.dtype

    def step(state, at):
        h, c = state
        t, gate = at
        hidden = _linear(h.astype(dtype), w_hh, b_hh)
        new_c = c
        if mode == "lstm":
            new_h, new_c = _lstm(gate + hidden, c)
            if w_hr is not None:
                new_h = _linear(new_h.astype(dtype), w_hr, None)
        elif mode == "gru":
            new_h = _gru(gate, hidden, h)
        else:
            new_h = jnp.tanh(gate + hidden) if mode == "tanh" else jax.nn.relu(gate + hidden)
        out = new_h
        if lengths is not None:
            inside = (t < lengths)[:, None]
            out = jnp.where(inside, new_h, jnp.zeros((), new_h.dtype))
            new_h = jnp.where(inside, new_h, h)
            new_c = None if new_c is None else jnp.where(inside, new_c, c)
        return (new_h, new_c), out.astype(dtype)

    time = jnp.arange(x.shape[0], dtype=jnp.int32)
    (h, c), out = lax.scan(step, states, (time, gates), reverse=reverse)
    return out, h.astype(dtype), None if c is None else c.astype(dtype)


@lowering("tpu.rnn_layer.default")
def rnn_layer(input, h, c, weights, lengths, mode, reverse):
    out, h, c = _layer(mode, input, h, c, weights, lengths, reverse)
    return out, h, jnp.zeros((0,), input.dtype) if c is None else c


@lowering("tpu.rnn_layer_backward.default")
def rnn_layer_backward(grad_out, grad_h, grad_c, input, h, c, weights, lengths, mode, reverse):
    """Runs the layer again rather than keep every gate of every step."""
    present = [w for w in weights if w is not None]

    def forward(x, h, c, *given):
        rest = iter(given)
        return _layer(mode, x, h, c, [None if w is None else next(rest) for w in weights], lengths, reverse)

    results, pull = jax.vjp(forward, input, h, c, *present)
    given = (grad_out, grad_h, grad_c)
    dx, dh, dc, *dw = pull(tuple(
        None if r is None else jnp.zeros_like(r) if g is None else g.astype(r.dtype) for r, g in zip(results, given)))
    rest = iter(dw)
    nothing = jnp.zeros((0,), input.dtype)
    return dx, dh, nothing if dc is None else dc, [nothing if w is None else next(rest) for w in weights]


def _plus(x, bias):
    return wide(x) if bias is None else wide(x) + wide(bias)


@lowering("aten._thnn_fused_lstm_cell.default")
def fused_lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = _plus(input_gates, input_bias) + _plus(hidden_gates, hidden_bias)
    i, f, g, o = jnp.split(gates, 4, -1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    cy = f * wide(cx) + i * g
    workspace = jnp.concatenate([i, f, g, o], -1)
    return tuple(x.astype(cx.dtype) for x in (o * jnp.tanh(cy), cy, workspace))


@lowering("aten._thnn_fused_lstm_cell_backward_impl.default")
def fused_lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = jnp.split(wide(workspace), 4, -1)
    tanh = jnp.tanh(wide(cy))
    zero = jnp.zeros_like(tanh)
    dh = zero if grad_hy is None else wide(grad_hy)
    dc = (zero if grad_cy is None else wide(grad_cy)) + dh * o * (1 - tanh * tanh)
    gates = jnp.concatenate([dc * g * i * (1 - i), dc * wide(cx) * f * (1 - f), dc * i * (1 - g * g),
                             dh * tanh * o * (1 - o)], -1)
    bias = jnp.sum(gates, 0).astype(cx.dtype) if has_bias else None
    return gates.astype(cx.dtype), (dc * f).astype(cx.dtype), bias


@lowering("aten._thnn_fused_gru_cell.default")
def fused_gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    ri, zi, ni = jnp.split(_plus(input_gates, input_bias), 3, -1)
    rh, zh, nh = jnp.split(_plus(hidden_gates, hidden_bias), 3, -1)
    r, z = jax.nn.sigmoid(ri + rh), jax.nn.sigmoid(zi + zh)
    n = jnp.tanh(ni + r * nh)
    h = wide(hx)
    workspace = jnp.concatenate([r, z, n, h, nh], -1)
    return (n + z * (h - n)).astype(hx.dtype), workspace.astype(hx.dtype)


@lowering("aten._thnn_fused_gru_cell_backward.default")
def fused_gru_cell_backward(grad_hy, workspace, has_bias):
    r, z, n, h, nh = jnp.split(wide(workspace), 5, -1)
    grad = wide(grad_hy)
    dn = grad * (1 - z) * (1 - n * n)
    dz = grad * (h - n) * z * (1 - z)
    dr = dn * nh * r * (1 - r)
    inputs, hidden = jnp.concatenate([dr, dz, dn], -1), jnp.concatenate([dr, dz, dn * r], -1)
    kind = grad_hy.dtype
    biases = (jnp.sum(inputs, 0).astype(kind), jnp.sum(hidden, 0).astype(kind)) if has_bias else (None, None)
    return inputs.astype(kind), hidden.astype(kind), (grad * z).astype(kind), *biases
