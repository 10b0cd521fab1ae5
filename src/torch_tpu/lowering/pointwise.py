"""Elementwise arithmetic. Narrow floats are computed in float32 and rounded once, as PyTorch's CPU kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import promotion
from .table import lowering

cast, promote, promote_float, wide = promotion.cast, promotion.promote, promotion.promote_float, promotion.wide


def is_complex(x: Any) -> bool:
    return np.dtype(x.dtype).kind == "c"


def is_bool(x: Any) -> bool:
    return np.dtype(x.dtype) == np.bool_


def is_float(x: Any) -> bool:
    """A real floating value (bfloat16 and float8 included)."""
    return not promotion.is_integral(x) and not is_complex(x)


def operands(*xs: Any) -> tuple[Any, ...]:
    """Promoted, in the type they are computed in. A number or 0-d value next to a narrow float is not rounded to it
    first (ATen's opmath kernels read the scalar in float32)."""
    dtype = promotion.result_dtype(*xs)
    if not dtype.is_floating_point or dtype.itemsize > 2:
        return tuple(cast(x, dtype) for x in xs)
    return tuple(cast(x, np.float32) if promotion.is_number(x) or x.ndim == 0 else cast(x, dtype).astype(jnp.float32)
                 for x in xs)


def real_operands(*xs: Any) -> tuple[Any, ...]:
    """`operands`, with integers as the default floating dtype."""
    values = operands(*xs)
    return values if not promotion.is_integral(values[0]) else promote_float(*xs)


def _unary(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: fn(wide(self))


def _unary_float(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: fn(wide(promote_float(self)[0]))


def _integers_stay(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: self if promotion.is_integral(self) else fn(wide(self))


def _binary(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: fn(*(wide(x) for x in promote(self, other)))


def _binary_float(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: fn(*(wide(x) for x in promote_float(self, other)))


def sgn(x: Any) -> Any:
    if is_complex(x):
        size = jnp.abs(x)
        return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))
    return x if is_bool(x) else jnp.where(jnp.isnan(x), 0, jnp.sign(x)) if is_float(x) else jnp.sign(x)


def _angle(x: Any) -> Any:
    if is_complex(x):
        return jnp.angle(x)
    x = promote_float(x)[0]
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, np.pi, 0).astype(x.dtype))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + jnp.exp(-x)) if is_complex(x) else jax.nn.sigmoid(x)


def _log2(x: Any) -> Any:
    return jnp.log2(x) if not is_complex(x) else jnp.log(x) * (1 / np.log(2))


def _log10(x: Any) -> Any:
    return jnp.log10(x) if not is_complex(x) else jnp.log(x) * (1 / np.log(10))


def _reciprocal(x: Any) -> Any:
    return 1 / x


def _isinf(x: Any) -> Any:
    return jnp.isinf(x) if not promotion.is_integral(x) else jnp.zeros(x.shape, bool)


# Results are floating: integers become the default floating dtype first.
FLOAT_UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": jnp.log, "log2": _log2, "log10": _log10,
    "log1p": jnp.log1p, "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt, "reciprocal": _reciprocal, "sigmoid": _sigmoid,
    "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin, "acos": jnp.arccos, "atan": jnp.arctan,
    "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh, "asinh": jnp.arcsinh, "acosh": jnp.arccosh,
    "atanh": jnp.arctanh, "sinc": jnp.sinc, "deg2rad": lambda x: x * (np.pi / 180),
    "rad2deg": lambda x: x * (180 / np.pi),
}
# Results have the argument's own type.
UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": jnp.abs, "neg": jnp.negative, "sign": sgn, "sgn": sgn, "positive": lambda x: x, "angle": _angle,
    "_conj_physical": jnp.conj, "conj_physical": jnp.conj, "square": jnp.square,
    "isnan": lambda x: x != x, "isinf": _isinf,
    "signbit": lambda x: x < 0 if promotion.is_integral(x) else jnp.signbit(x),
    "isposinf": lambda x: _isinf(x) & (x > 0), "isneginf": lambda x: _isinf(x) & (x < 0),
    "logical_not": lambda x: x == 0,
    "bitwise_not": jnp.invert,
}
# Rounding: integers are what they are.
ROUNDING: dict[str, Callable[[Any], Any]] = {
    "ceil": jnp.ceil, "floor": jnp.floor, "trunc": jnp.trunc, "round": jnp.round, "frac": lambda x: x - jnp.trunc(x),
}
for _names, _shape in ((FLOAT_UNARY, _unary_float), (UNARY, _unary), (ROUNDING, _integers_stay)):
    for _name, _fn in _names.items():
        lowering(f"aten.{_name}.default")(_shape(_fn))


@lowering("aten.round.decimals")
def round_decimals(self, decimals=0):
    if promotion.is_integral(self):
        return self
    x, scale = wide(self), 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale


@lowering("aten.add.Tensor", "aten.add.Scalar")
def add(self, other, alpha=1):
    return _sum(self, other, alpha, jnp.add)


@lowering("aten.sub.Tensor", "aten.sub.Scalar")
def sub(self, other, alpha=1):
    return _sum(self, other, alpha, jnp.subtract)


@lowering("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(self, other, alpha=1):
    return _sum(other, self, alpha, jnp.subtract)


def _sum(left: Any, right: Any, alpha: Any, fn: Callable[[Any, Any], Any]) -> Any:
    a, b = operands(left, right)
    one = isinstance(alpha, int) and alpha == 1
    if is_bool(a):
        return a | (b if one else b & cast(alpha, bool))
    # The factor, unlike a scalar operand, is rounded to the result's type, in ATen's CPU kernels.
    return fn(a, b if one else b * wide(cast(alpha, promotion.result_dtype(left, right))))


@lowering("aten._add_relu.Tensor", "aten._add_relu.Scalar")
def add_relu(self, other, alpha=1):
    return jnp.maximum(add(self, other, alpha), 0)


@lowering("aten.mul.Tensor", "aten.mul.Scalar")
def mul(self, other):
    a, b = operands(self, other)
    return a & b if is_bool(a) else a * b


@lowering("aten.div.Tensor", "aten.div.Scalar")
def div(self, other):
    a, b = real_operands(self, other)
    return a / b


@lowering("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(self, other, rounding_mode=None):
    if rounding_mode is None:
        return div(self, other)
    a, b = operands(self, other)
    if rounding_mode == "floor":
        return floor_div(a, b)
    return lax.div(*jnp.broadcast_arrays(a, b)) if promotion.is_integral(a) else jnp.trunc(
        wide(cast(a / b, promotion.result_dtype(self, other))))  # ATen rounds a narrow quotient first


def floor_div(a: Any, b: Any) -> Any:
    """Floating division that agrees with Python's: the remainder is exact, so the quotient never rounds up."""
    if promotion.is_integral(a):
        return jnp.floor_divide(a, b)
    a, b = jnp.broadcast_arrays(a, b)
    mod = lax.rem(a, b)
    quotient = (a - mod) / b
    quotient = jnp.where((mod != 0) & ((b < 0) != (mod < 0)), quotient - 1, quotient)
    low = jnp.floor(quotient)
    low = jnp.where(quotient - low > 0.5, low + 1, low)
    result = jnp.where(quotient != 0, low, jnp.copysign(0, a / b))
    return jnp.where(b == 0, a / b, result)


@lowering("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(self, other):
    return floor_div(*operands(self, other))


@lowering("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(self, other):
    return lax.rem(*jnp.broadcast_arrays(*(wide(x) for x in promote(self, other))))


@lowering("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(self, other):
    a, b = jnp.broadcast_arrays(*(wide(x) for x in promote(self, other)))
    mod = lax.rem(a, b)
    return jnp.where((mod != 0) & ((b < 0) != (mod < 0)), mod + b, mod)


def power(a: Any, b: Any) -> Any:
    if not promotion.is_integral(a):
        return jnp.power(a, b)
    a, b = (x.astype(jnp.int8) if is_bool(x) else x for x in (a, b))
    result = jnp.power(a, jnp.maximum(b, 0))
    if np.dtype(b.dtype).kind == "u":
        return result
    # Negative powers of integers: 1/a, truncated.
    unit = jnp.where(a == 1, 1, jnp.where(a == -1, jnp.where(b % 2 == 0, 1, -1), 0)).astype(result.dtype)
    return jnp.where(b < 0, unit, result)


@lowering("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def pow_(self, exponent):
    return power(*(wide(x) for x in promote(self, exponent)))


@lowering("aten.pow.Tensor_Scalar", static=("exponent",))
def pow_scalar(self, exponent):
    dtype = promotion.result_dtype(self, exponent)
    x = wide(cast(self, dtype))
    if isinstance(exponent, complex):
        return jnp.power(x, cast(exponent, x.dtype))
    if is_complex(x) and exponent != 2:
        return jnp.power(x, cast(exponent, x.dtype))
    if float(exponent).is_integer() and abs(exponent) <= 64:
        return lax.integer_pow(x, int(exponent)) if exponent >= 0 or not promotion.is_integral(x) else power(
            x, cast(exponent, x.dtype))
    if exponent == 0.5:
        return jnp.sqrt(x)
    if exponent == -0.5:
        return lax.rsqrt(x)
    return power(x, cast(exponent, x.dtype))


def logaddexp(a: Any, b: Any) -> Any:
    if not is_complex(a):
        return jnp.logaddexp(a, b)
    # jnp's would bring the phase back to (-pi, pi]; ATen's keeps the greater operand's.
    small = a.real < b.real
    low, high = jnp.where(small, a, b), jnp.where(small, b, a)
    return high + jnp.log1p(jnp.exp(low - high))


def _heaviside(x: Any, values: Any) -> Any:
    return jnp.where(x == 0, values, (x > 0).astype(values.dtype))


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "maximum": jnp.maximum, "minimum": jnp.minimum, "fmax": jnp.fmax, "fmin": jnp.fmin, "hypot": jnp.hypot,
    "logaddexp": logaddexp, "logaddexp2": jnp.logaddexp2, "heaviside": _heaviside, "gcd": jnp.gcd, "lcm": jnp.lcm,
}
for _name, _both in BINARY.items():
    lowering(f"aten.{_name}.default")(_binary(_both))
lowering("aten.atan2.default")(_binary_float(jnp.arctan2))
lowering("aten.copysign.Tensor", "aten.copysign.Scalar")(_binary_float(jnp.copysign))


@lowering("aten.nextafter.default")
def nextafter(self, other):
    return jnp.nextafter(*promote(self, other))


@lowering("aten.ldexp.Tensor")
def ldexp(self, other):
    a, b = promote_float(self, other)
    return wide(a) * jnp.exp2(wide(b))


@lowering("aten.frexp.Tensor")
def frexp(self):
    mantissa, exponent = jnp.frexp(wide(self))
    finite = jnp.isfinite(wide(self))
    return jnp.where(finite, mantissa, wide(self)), jnp.where(finite, exponent, 0)


@lowering("aten.clamp.default", "aten.clamp.Tensor")
def clamp(self, min=None, max=None):
    values = iter(promote(*(x for x in (self, min, max) if x is not None)))
    x = next(values)
    x = x if min is None else jnp.maximum(x, next(values))
    return x if max is None else jnp.minimum(x, next(values))


@lowering("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(self, min):
    return clamp(self, min=min)


@lowering("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(self, max):
    return clamp(self, max=max)


@lowering("aten.addcmul.default")
def addcmul(self, tensor1, tensor2, value=1):
    a, b, c = (wide(x) for x in promote(self, tensor1, tensor2))
    return a + cast(value, a.dtype) * b * c


@lowering("aten.addcdiv.default")
def addcdiv(self, tensor1, tensor2, value=1):
    a, b, c = (wide(x) for x in promote(self, tensor1, tensor2))
    return a + cast(value, a.dtype) * b / c


@lowering("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(self, end, weight):
    start, end = (wide(x) for x in promote(self, end))
    weight = cast(weight, start.dtype)
    span = end - start
    small = jnp.abs(weight) < 0.5
    return jnp.where(small, start + weight * span, end - span * (1 - weight))


@lowering("aten.nan_to_num.default")
def nan_to_num(self, nan=None, posinf=None, neginf=None):
    if promotion.is_integral(self):
        return self
    if is_complex(self):
        return lax.complex(nan_to_num(self.real, nan, posinf, neginf), nan_to_num(self.imag, nan, posinf, neginf))
    limits = jnp.finfo(self.dtype)
    high = cast(limits.max if posinf is None else posinf, self.dtype)
    low = cast(limits.min if neginf is None else neginf, self.dtype)
    x = jnp.where(jnp.isnan(self), cast(0.0 if nan is None else nan, self.dtype), self)
    return jnp.where(self == jnp.inf, high, jnp.where(self == -jnp.inf, low, x))


@lowering("aten.complex.default")
def complex_(real, imag):
    return lax.complex(*jnp.broadcast_arrays(wide(real), wide(imag)))  # float16 has no complex type in XLA


@lowering("aten.polar.default")
def polar(abs, angle):
    abs, angle = jnp.broadcast_arrays(abs, angle)
    return lax.complex(abs * jnp.cos(angle), abs * jnp.sin(angle))


@lowering("aten.where.self")
def where(condition, self, other):
    return jnp.where(condition != 0 if condition.dtype != bool else condition, *promote(self, other))
