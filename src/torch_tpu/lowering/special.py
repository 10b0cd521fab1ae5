"""Special functions, computed in float32 or wider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special as sp

from . import promotion
from .pointwise import _binary_float, _unary_float
from .table import lowering


def _digamma(x: Any) -> Any:
    """At the poles: -inf at +0, inf at -0, NaN at the negative integers."""
    pole = jnp.where(jnp.signbit(x), jnp.inf, -jnp.inf).astype(x.dtype)
    negative = (x < 0) & (x == jnp.floor(x))
    return jnp.where(x == 0, pole, jnp.where(negative, jnp.nan, sp.digamma(jnp.where((x == 0) | negative, 1, x))))


def _entr(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), x, jnp.where(x > 0, -x * jnp.log(jnp.where(x > 0, x, 1)), jnp.where(
        x == 0, 0, -jnp.inf)))


def _xlogy(x: Any, y: Any) -> Any:
    return jnp.where(jnp.isnan(y), jnp.nan, jnp.where(x == 0, 0, x * jnp.log(y)))


def _xlog1py(x: Any, y: Any) -> Any:
    return jnp.where(jnp.isnan(y), jnp.nan, jnp.where(x == 0, 0, x * jnp.log1p(y)))


# Denominators of the Euler-Maclaurin terms: (2k)! / B_2k.
_ZETA = (12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10,
         -2.950130727918164224e12, 1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17,
         -7.1661652561756670113e18)


def zeta(x: Any, q: Any) -> Any:
    """Hurwitz' zeta function by Cephes' method, which reaches negative q: terms up to a > 9, then Euler-Maclaurin."""
    x, q = jnp.broadcast_arrays(x, q)
    pole = (q <= 0) & (q == jnp.floor(q))
    known = (x <= 1) | pole | ((q <= 0) & (x != jnp.floor(x))) | ~(jnp.isfinite(x) & jnp.isfinite(q))
    x_, q_ = jnp.where(known, 2, x), jnp.where(known, 1, q)

    def term(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, a, b, total = state
        go = (count < 9) | (a <= 9)
        a = jnp.where(go, a + 1, a)
        b = jnp.where(go, jnp.power(a, -x_), b)
        return count + 1, a, b, jnp.where(go, total + b, total)

    start = jnp.asarray(0, jnp.int32), q_, jnp.zeros_like(q_), jnp.power(q_, -x_)
    _, w, b, total = lax.while_loop(lambda state: jnp.any((state[0] < 9) | (state[1] <= 9)), term, start)
    total = total + b * w / (x_ - 1) - 0.5 * b
    factor = jnp.ones_like(x_)
    for k, denominator in zip(range(0, 24, 2), _ZETA):
        factor, b = factor * (x_ + k), b / w
        more = factor * b / denominator
        total = jnp.where(jnp.isfinite(more), total + more, total)
        factor, b = factor * (x_ + k + 1), b / w
    nothing = jnp.where((x == 1) | (pole & (x > 1)), jnp.inf, jnp.nan)
    nothing = jnp.where((x > 1) & (q == jnp.inf), 0, nothing)
    return jnp.where(known, nothing, total)


def _trigamma(x: Any) -> Any:
    low = x < 0.5
    reflected = -(np.pi ** 2) / jnp.square(jnp.sin(np.pi * x))
    z = jnp.where(low, 1 - x, x)
    total = jnp.where(low, reflected, 0)
    for _ in range(6):
        total, z = total + 1 / (z * z), z + 1
    inverse = 1 / (z * z)
    total = total + (1 + 1 / (2 * z) + inverse * (1 / 6 - inverse * (1 / 30 - inverse / 42))) / z
    return jnp.where(low, -total, total)


def _erfcx(x: Any) -> Any:
    """exp(x^2) erfc(x), in float64: the two factors take each other's digits."""
    wide = x.astype(jnp.float64)
    near = jnp.exp(jnp.square(jnp.minimum(wide, 25))) * sp.erfc(jnp.minimum(wide, 25))
    inverse = 1 / jnp.square(jnp.maximum(wide, 25))
    far = (1 - inverse / 2 * (1 - 1.5 * inverse * (1 - 2.5 * inverse))) / (wide * np.sqrt(np.pi))
    return jnp.where(wide < 25, near, far)


UNARY: dict[str, Callable[[Any], Any]] = {
    "erf": sp.erf, "erfc": sp.erfc, "erfinv": sp.erfinv, "lgamma": sp.gammaln, "digamma": _digamma, "i0": sp.i0,
    "special_i0e": sp.i0e, "special_i1": sp.i1, "special_i1e": sp.i1e, "special_ndtri": sp.ndtri,
    "special_log_ndtr": sp.log_ndtr, "special_entr": _entr, "special_erfcx": _erfcx,
}
for _name, _fn in UNARY.items():
    lowering(f"aten.{_name}.default")(_unary_float(_fn))
lowering("aten.xlogy.Tensor", "aten.xlogy.Scalar_Self", "aten.xlogy.Scalar_Other")(_binary_float(_xlogy))
lowering("aten.special_xlog1py.default", "aten.special_xlog1py.self_scalar",
         "aten.special_xlog1py.other_scalar")(_binary_float(_xlog1py))
lowering("aten.special_zeta.default", "aten.special_zeta.self_scalar",
         "aten.special_zeta.other_scalar")(_binary_float(zeta))
lowering("aten.igamma.default")(_binary_float(sp.gammainc))
lowering("aten.igammac.default")(_binary_float(sp.gammaincc))


@lowering("aten.polygamma.default")
def polygamma(n, self):
    x = promotion.wide(promotion.promote_float(self)[0])
    if n < 2:
        return _digamma(x) if n == 0 else _trigamma(x)
    return (-1.0) ** (n + 1) * float(np.prod(np.arange(1.0, n + 1))) * zeta(jnp.full_like(x, n + 1), x)


@lowering("aten.mvlgamma.default")
def mvlgamma(self, p):
    x = promotion.wide(promotion.promote_float(self)[0])
    halves = jnp.arange(p, dtype=x.dtype) * 0.5
    return p * (p - 1) * 0.25 * np.log(np.pi) + jnp.sum(sp.gammaln(x[..., None] - halves), -1)


@lowering("aten.logit.default")
def logit(self, eps=None):
    x = promotion.wide(promotion.promote_float(self)[0])
    x = x if eps is None else jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


@lowering("aten.logit_backward.default")
def logit_backward(grad_output, self, eps=None):
    g, x = promotion.wide(grad_output), promotion.wide(self)
    slope = g / (x * (1 - x))
    if eps is None:
        return jnp.where((x < 0) | (x > 1), jnp.nan, slope)
    return jnp.where((x < eps) | (x > 1 - eps), 0, slope)
