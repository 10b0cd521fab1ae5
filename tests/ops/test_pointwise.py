"""Elementwise operators: values, promotion, corner cases, and in-place and out= forms."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import compare, compare_grad

pytestmark = pytest.mark.usefixtures("no_fallback")

SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.5, 3.5, math.inf, -math.inf, math.nan, 1e-30, 123.4])
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def values(dtype: torch.dtype, shape: tuple[int, ...] = (4, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(shape, generator=generator) * 4
    if dtype == torch.uint8:
        return drawn.abs().to(dtype)
    return drawn > 0 if dtype == torch.bool else drawn.to(dtype)


@pytest.mark.parametrize("name", ["exp", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh",
                                  "sigmoid", "log1p", "log2", "log10", "reciprocal", "erf", "erfc", "lgamma", "sinc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_float_unary(name, dtype):
    compare(getattr(torch, name), values(dtype), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["abs", "neg", "sign", "floor", "ceil", "trunc", "round", "frac", "isnan", "isinf",
                                  "isposinf", "isneginf", "signbit", "logical_not", "isfinite", "relu"])
def test_special_values(name):
    compare(getattr(torch, name), SPECIAL, rtol=0, atol=0)


@pytest.mark.parametrize("left", DTYPES)
@pytest.mark.parametrize("right", DTYPES)
@pytest.mark.parametrize("name", ["add", "mul", "maximum", "lt", "eq"])
def test_promotion(name, left, right):
    compare(getattr(torch, name), values(left), values(right, (5,)), rtol=1e-2)


@pytest.mark.parametrize("number", [2, 2.5, True, -3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers(number, dtype):
    compare(lambda x: x * number + number, values(dtype), rtol=1e-2)
    compare(lambda x: x / number, values(dtype), rtol=1e-2)


def test_0d_tensors_do_not_promote():
    x = torch.randn(3, dtype=torch.bfloat16)
    compare(lambda a, b: a + b, x, torch.tensor(1.5), rtol=0, atol=0)
    compare(lambda a, b: a * b, torch.arange(3), torch.tensor(1.5))


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
def test_division(mode):
    compare(lambda a, b: torch.div(a, b, rounding_mode=mode), torch.tensor([7, -7, 7, -7]),
            torch.tensor([2, 2, -2, -2]))
    compare(lambda a, b: torch.div(a, b, rounding_mode=mode),
            torch.tensor([7.5, -7.5, math.inf, 0.1, 1.0, -0.0]), torch.tensor([2.0, 2.0, 1.0, 0.1, 0.0, 3.0]), rtol=0)


def test_remainders():
    a, b = torch.tensor([7, -7, 7, -7, 0]), torch.tensor([3, 3, -3, -3, 5])
    for fn in (torch.remainder, torch.fmod, torch.floor_divide):
        compare(fn, a, b, rtol=0, atol=0)
        compare(fn, a.float() / 2, b.float(), rtol=0, atol=0)
    compare(lambda x: torch.remainder(10, x), b)


def test_integers_wrap():
    compare(lambda x: x + 100, torch.tensor([120, -120], dtype=torch.int8))
    compare(lambda x: x * x, torch.tensor([2**40 + 1, -3]))
    compare(lambda x: x - 1, torch.tensor([0], dtype=torch.uint8))


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.7])
def test_pow(exponent):
    compare(lambda x: x ** exponent, torch.tensor([0.5, 1.0, 2.0, 3.5]))
    compare(lambda x: exponent ** x, torch.tensor([0.5, 1.0, 2.0]), rtol=2e-5)
    if isinstance(exponent, int) and exponent >= 0:
        compare(lambda x: x ** exponent, torch.tensor([2**33, -3, 0]), rtol=0, atol=0)


def test_pow_of_integers():
    compare(torch.pow, torch.tensor([2, 3, -1, -1, 1, 5]), torch.tensor([10, 0, 3, -2, -5, -1]))


def test_clamp_and_nan():
    compare(lambda x: x.clamp(-1, 2), SPECIAL, rtol=0)
    compare(lambda x: x.clamp(min=0.5), SPECIAL, rtol=0)
    compare(lambda x: x.clamp(2, 1), SPECIAL, rtol=0)
    compare(lambda x, low: torch.clamp(x, low), SPECIAL, torch.tensor(math.nan), rtol=0)
    flipped = SPECIAL.flip(0)
    for fn in (torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.atan2, torch.hypot, torch.copysign):
        compare(fn, SPECIAL, flipped)
    compare(lambda x: torch.nan_to_num(x, 1.0, posinf=2.0), SPECIAL)


def test_comparisons_with_numbers():
    x = torch.tensor([1, 2, 3])
    for fn in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge):
        compare(lambda a: fn(a, 2), x)
        compare(lambda a: fn(a, 2.5), x)


def test_bits():
    a, b = torch.tensor([12, -5, 7]), torch.tensor([10, 3, -1])
    for fn in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor):
        compare(fn, a, b)
        compare(fn, a > 0, b > 0)
    compare(lambda x: ~x, a)
    shifts = torch.tensor([1, 70, -1])
    compare(torch.bitwise_left_shift, a, shifts)
    compare(torch.bitwise_right_shift, a, shifts)
    compare(lambda x: x << 2, a)


def test_isin():
    compare(torch.isin, torch.arange(6), torch.tensor([1, 4]))
    compare(lambda x: torch.isin(x, 3, invert=True), torch.arange(6))


def test_ternary():
    a, b, c = torch.randn(3, 4), torch.randn(4), torch.rand(3, 1) + 0.5
    compare(lambda a, b, c: torch.addcmul(a, b, c, value=0.3), a, b, c)
    compare(lambda a, b, c: torch.addcdiv(a, b, c, value=-2), a, b, c)
    compare(lambda a, b, c: torch.lerp(a, b, c), a, b, c)
    compare(lambda a, b: torch.lerp(a, b, 0.9), a, b)
    compare(lambda a, b: torch.where(a > 0, a, 0), a, b)
    compare_grad(lambda a, b, c: torch.addcdiv(a, b, c), a, b, c)


def test_in_place_and_out():
    compare(lambda x: x.add_(1.5).mul_(2).clamp_(max=3), torch.randn(5))
    compare(lambda x: x[::2].add_(1), torch.randn(6))
    compare(lambda x, out: torch.exp(x, out=out), torch.randn(3), torch.empty(3))
    compare(lambda x, out: torch.add(x, x, alpha=3, out=out), torch.randn(3), torch.empty(3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.ones(2, dtype=torch.int64, device="tpu").mul_(0.5)


def test_narrow_floats_round_once():
    x, y = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    compare(lambda a, b: a + 0.3 * b, x, y, rtol=0, atol=0)
    compare(lambda a, b: torch.add(a, b, alpha=0.3), x, y, rtol=0, atol=0)
    compare(lambda a: a * 0.1, x, rtol=0, atol=0)


def test_complex():
    z = torch.randn(4, dtype=torch.complex64)
    for fn in (torch.exp, torch.abs, torch.angle, torch.sgn, torch.tanh, torch.sqrt, torch.log, torch.reciprocal):
        compare(fn, z, rtol=1e-4)
    compare(lambda a: (a * a.conj()).real, z)
    compare(torch.complex, torch.randn(3), torch.randn(3))


@pytest.mark.parametrize("name", [
    "relu", "relu6", "silu", "gelu", "mish", "elu", "selu", "celu", "hardtanh", "hardswish", "hardsigmoid",
    "hardshrink", "leaky_relu", "logsigmoid", "softplus", "softshrink", "softsign", "tanhshrink", "glu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(name, dtype):
    fn = getattr(torch.nn.functional, name)
    x = (torch.randn(3, 8) * 3).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    compare(fn, x, rtol=tolerance, atol=tolerance)
    compare_grad(fn, x, rtol=tolerance * 10, atol=tolerance * 5)


def test_activation_arguments():
    functional = torch.nn.functional
    x = torch.randn(2, 6)
    compare_grad(lambda x: functional.gelu(x, approximate="tanh"), x)
    compare_grad(lambda x, w: functional.prelu(x, w), x, torch.rand(6))
    compare_grad(lambda x: functional.threshold(x, 0.1, 20), x)
    compare_grad(lambda x: functional.rrelu(x, training=False), x)
    compare_grad(lambda x: functional.softplus(x, beta=2, threshold=1), x)


def test_softmax():
    x = torch.randn(2, 3, 4)
    for dim in (0, 1, -1):
        compare_grad(lambda x: x.softmax(dim).square(), x)
        compare_grad(lambda x: x.log_softmax(dim) * x, x)
    compare(lambda x: x.softmax(0), torch.tensor(3.0))
    compare(lambda x: torch.softmax(x, -1, dtype=torch.float32), x.bfloat16())
    masked = x.masked_fill(torch.tensor([True, False, True, True]), -math.inf)
    masked[0, 0] = -math.inf
    compare(lambda x: x.softmax(-1), masked)
    compare(lambda x: torch.ops.aten._safe_softmax(x, -1), masked)


@pytest.mark.parametrize("name", ["bessel_j0", "bessel_y1", "modified_bessel_k1", "airy_ai", "spherical_bessel_j0",
                                  "i0e", "i1", "ndtri", "log_ndtr", "entr", "erfcx", "digamma"])
def test_special_functions(name):
    fn = getattr(torch.special, name)
    compare(fn, torch.linspace(0.05, 0.95, 50), rtol=1e-4, atol=1e-5)
    if name not in ("ndtri", "log_ndtr"):
        compare(fn, torch.linspace(0.5, 20, 50), rtol=1e-4, atol=1e-5)


def test_special_of_two():
    x, n = torch.linspace(-2, 2, 9), torch.tensor([0, 1, 2, 3, 9, 5, -1, 7, 8])
    for name in ("chebyshev_polynomial_t", "hermite_polynomial_h", "laguerre_polynomial_l", "legendre_polynomial_p"):
        compare(getattr(torch.special, name), x, n, rtol=1e-4, atol=1e-4)
    compare(torch.xlogy, torch.tensor([0.0, 1.0, 2.0]), torch.tensor([math.nan, 0.0, 3.0]))
    compare(torch.special.zeta, torch.tensor([2.0, 3.0, 1.0]), torch.tensor([-0.5, 4.0, 2.0]), rtol=1e-5)
    compare(lambda x: torch.polygamma(2, x), torch.tensor([0.3, 1.5, -0.5]), rtol=1e-4)
