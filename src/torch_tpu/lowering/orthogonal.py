"""Orthogonal polynomials by their three-term recurrences, with a degree per element.

Inside (-1, 1) Chebyshev's polynomials of higher degree take their trigonometric form, where ATen does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import promotion
from .table import lowering


def _degrees(n: Any) -> Any:
    """Degrees as int64, truncated; what is no number is a negative degree, whose polynomial is 0."""
    if promotion.is_integral(n):
        return n.astype(jnp.int64)
    return jnp.where(jnp.isfinite(n), n, -1).astype(jnp.int64)


def _recurrence(x: Any, n: Any, first: Any, step: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """p_0 = 1, p_1 = first, p_(k+1) = step(x, p_k, p_(k-1), k)."""
    one = jnp.ones_like(x)

    def turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
        k, before, last, result = state
        value = step(x, last, before, k.astype(x.dtype))
        return k + 1, last, value, jnp.where(n > k, value, result)

    start = (jnp.asarray(1, jnp.int64), one, first, jnp.where(n == 0, one, first))
    top = jnp.max(n) if n.size else 0
    result = lax.while_loop(lambda state: state[0] < top, turn, start)[3]
    return jnp.where(n < 0, 0, result)


def _twice(x: Any, last: Any, before: Any, k: Any) -> Any:
    return 2 * x * last - before


def _inside(x: Any, n: Any, beyond: int, form: Callable[[Any, Any], Any], value: Any) -> Any:
    angle = jnp.arccos(jnp.clip(x, -1, 1))
    return jnp.where((n > beyond) & (jnp.abs(x) < 1), form(angle, n.astype(x.dtype)), value)


def chebyshev_t(x: Any, n: Any, beyond: int = 6) -> Any:
    return _inside(x, n, beyond, lambda a, k: jnp.cos(k * a), _recurrence(x, n, x, _twice))


def chebyshev_u(x: Any, n: Any, beyond: int = 8) -> Any:
    return _inside(x, n, beyond, lambda a, k: jnp.sin((k + 1) * a) / jnp.sin(a), _recurrence(x, n, 2 * x, _twice))


def chebyshev_v(x: Any, n: Any, beyond: int = 8) -> Any:
    return _inside(x, n, beyond, lambda a, k: jnp.cos((k + 0.5) * a) / jnp.cos(a / 2),
                   _recurrence(x, n, 2 * x - 1, _twice))


def chebyshev_w(x: Any, n: Any, beyond: int = 8) -> Any:
    return _inside(x, n, beyond, lambda a, k: jnp.sin((k + 0.5) * a) / jnp.sin(a / 2),
                   _recurrence(x, n, 2 * x + 1, _twice))


def _limited(x: Any, n: Any, value: Any) -> Any:
    """Degrees for which ATen gives up."""
    return jnp.where(n > (512 if np.dtype(x.dtype) == np.float64 else 128), jnp.nan, value)


def hermite_h(x: Any, n: Any) -> Any:
    n_ = jnp.minimum(n, 513)
    return _limited(x, n, _recurrence(x, n_, 2 * x, lambda x, last, before, k: 2 * x * last - 2 * k * before))


def hermite_he(x: Any, n: Any) -> Any:
    n_ = jnp.minimum(n, 513)
    return _limited(x, n, _recurrence(x, n_, x, lambda x, last, before, k: x * last - k * before))


def laguerre(x: Any, n: Any) -> Any:
    value = _recurrence(x, n, 1 - x, lambda x, last, before, k: ((2 * k + (1 - x)) * last - k * before) / (k + 1))
    return jnp.where((x == 0) & (n >= 0), 1, value)


def legendre(x: Any, n: Any) -> Any:
    return _recurrence(x, n, x, lambda x, last, before, k: ((2 * k + 1) * x * last - k * before) / (k + 1))


POLYNOMIALS: dict[str, Callable[[Any, Any], Any]] = {
    "chebyshev_polynomial_t": chebyshev_t, "chebyshev_polynomial_u": chebyshev_u,
    "chebyshev_polynomial_v": chebyshev_v, "chebyshev_polynomial_w": chebyshev_w,
    "shifted_chebyshev_polynomial_t": lambda x, n: chebyshev_t(2 * x - 1, n, 6),
    "shifted_chebyshev_polynomial_u": lambda x, n: chebyshev_u(2 * x - 1, n, 6),
    "shifted_chebyshev_polynomial_v": lambda x, n: chebyshev_v(2 * x - 1, n, 6),
    "shifted_chebyshev_polynomial_w": lambda x, n: chebyshev_w(2 * x - 1, n, 4),
    "hermite_polynomial_h": hermite_h, "hermite_polynomial_he": hermite_he, "laguerre_polynomial_l": laguerre,
    "legendre_polynomial_p": legendre,
}


def _entry(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def polynomial(x: Any, n: Any) -> Any:
        x, n = jnp.broadcast_arrays(*(promotion.wide(v) for v in promotion.promote_float(x, n)))
        return fn(x, _degrees(n))

    return polynomial


for _name, _fn in POLYNOMIALS.items():
    lowering(f"aten.special_{_name}.default", f"aten.special_{_name}.x_scalar",
             f"aten.special_{_name}.n_scalar")(_entry(_fn))
