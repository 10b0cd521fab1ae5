"""Fused optimiser steps, and loss scaling of mixed precision. Each returns its arguments as they are afterwards.

A step is skipped (everything keeps its value) when `found_inf` is 1. State is read and written in its own dtype and
computed in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from . import promotion
from .table import lowering

wide = promotion.wide


def _keep(found_inf: Any, old: Any, new: Any) -> Any:
    new = promotion.cast(new, old.dtype)
    return new if found_inf is None else jnp.where(found_inf.reshape(()) != 0, old, new)


def _gradient(grad: Any, grad_scale: Any, maximize: bool) -> tuple[Any, Any]:
    """The gradient to step along, and as it is written back (unscaled)."""
    g = wide(grad)
    if grad_scale is not None:
        g = g / grad_scale.reshape(()).astype(g.dtype)
    return (-g if maximize else g), g


def _number(x: Any, dtype: Any) -> Any:
    return promotion.cast(x, dtype).reshape(())


def _adam(decoupled: bool) -> Callable[..., Any]:
    def step(self: Sequence[Any], grads: Sequence[Any], exp_avgs: Sequence[Any], exp_avg_sqs: Sequence[Any],
             max_exp_avg_sqs: Sequence[Any], state_steps: Sequence[Any], *, lr: Any, beta1: Any, beta2: Any,
             weight_decay: Any, eps: Any, amsgrad: bool, maximize: bool, grad_scale: Any = None,
             found_inf: Any = None) -> tuple[list[Any], ...]:
        out: tuple[list[Any], ...] = ([], [], [], [], [])
        for i, (param, grad, avg, avg_sq, count) in enumerate(zip(self, grads, exp_avgs, exp_avg_sqs, state_steps)):
            p = wide(param)
            kind = p.dtype
            rate, b2, decay, e = (_number(v, kind) for v in (lr, beta2, weight_decay, eps))
            # 1 - beta and the powers in float64: the CPU kernel takes them in double before the loop.
            n = count.reshape(()).astype(jnp.float64)
            d1, d2 = (promotion.cast(v, jnp.float64).reshape(()) for v in (beta1, beta2))
            correct1 = 1 - d1 ** n
            correct2 = jnp.sqrt(1 - d2 ** n).astype(kind)
            g, kept = _gradient(grad, grad_scale, maximize)
            if decoupled:
                p = p * (1 - rate * decay)
            else:
                g = g + p * decay
            m, v = wide(avg), wide(avg_sq)
            m = m + (g - m) * (1 - d1).astype(kind)
            v = v * b2 + g * g * (1 - d2).astype(kind)
            second = v
            if amsgrad:
                second = jnp.maximum(wide(max_exp_avg_sqs[i]), v)
                out[4].append(_keep(found_inf, max_exp_avg_sqs[i], second))
            size = (promotion.cast(lr, jnp.float64).reshape(()) / correct1).astype(kind)
            p = p - size * m / (jnp.sqrt(second) / correct2 + e)
            for results, old, new in zip(out, (param, grad, avg, avg_sq), (p, kept, m, v)):
                results.append(_keep(found_inf, old, new) if results is not out[1] or grad_scale is not None else old)
        return out

    return step


_RATES = ("lr", "beta1", "beta2", "weight_decay", "eps", "momentum", "dampening", "lr_decay")
lowering("aten._fused_adam.default", "aten._fused_adam.tensor_lr", traced=_RATES)(_adam(decoupled=False))
lowering("aten._fused_adamw.default", "aten._fused_adamw.tensor_lr", traced=_RATES)(_adam(decoupled=True))


@lowering("aten._fused_sgd.default", "aten._fused_sgd.tensor_lr", traced=("lr", "weight_decay", "dampening"))
def fused_sgd(self, grads, momentum_buffer_list, *, weight_decay, momentum, lr, dampening, nesterov, maximize,
              is_first_step, grad_scale=None, found_inf=None):
    out: tuple[list[Any], ...] = ([], [], [])
    for i, (param, grad) in enumerate(zip(self, grads)):
        p = wide(param)
        g, kept = _gradient(grad, grad_scale, maximize)
        g = g + p * _number(weight_decay, p.dtype)
        if momentum:
            held = momentum_buffer_list[i]
            buffer = g if is_first_step else wide(held) * momentum + g * (1 - _number(dampening, p.dtype))
            out[2].append(_keep(found_inf, held, buffer))
            g = g + buffer * momentum if nesterov else buffer
        out[0].append(_keep(found_inf, param, p - _number(lr, p.dtype) * g))
        out[1].append(_keep(found_inf, grad, kept) if grad_scale is not None else grad)
    return out


@lowering("aten._fused_adagrad.default", "aten._fused_adagrad.tensor_lr",
          traced=("lr", "lr_decay", "weight_decay", "eps"))
def fused_adagrad(self, grads, state_sums, state_steps, *, lr, lr_decay, weight_decay, eps, maximize, grad_scale=None,
                  found_inf=None):
    out: tuple[list[Any], ...] = ([], [], [])
    for param, grad, total, count in zip(self, grads, state_sums, state_steps):
        p = wide(param)
        g, kept = _gradient(grad, grad_scale, maximize)
        g = g + p * _number(weight_decay, p.dtype)
        step = count.reshape(()).astype(p.dtype)
        rate = _number(lr, p.dtype) / (1 + (step - 1) * _number(lr_decay, p.dtype))
        s = wide(total) + g * g
        out[0].append(_keep(found_inf, param, p - rate * g / (jnp.sqrt(s) + _number(eps, p.dtype))))
        out[1].append(_keep(found_inf, grad, kept) if grad_scale is not None else grad)
        out[2].append(_keep(found_inf, total, s))
    return (*out, list(state_steps))


@lowering("aten._amp_foreach_non_finite_check_and_unscale.default")
def amp_unscale(self, found_inf, inv_scale):
    bad = found_inf
    for x in self:
        bad = jnp.where(jnp.all(jnp.isfinite(x)), bad, 1)
    return [wide(x) * wide(inv_scale).reshape(()) for x in self], bad


@lowering("aten._amp_update_scale.default")
def amp_update_scale(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval):
    bad = found_inf.reshape(()) != 0
    successes = growth_tracker + 1
    grow = successes == growth_interval
    grown = self * scale_growth_factor
    scale = jnp.where(bad, self * scale_backoff_factor, jnp.where(grow & jnp.isfinite(grown), grown, self))
    return scale, jnp.where(bad | grow, 0, successes)
