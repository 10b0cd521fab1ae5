"""Reductions and running reductions."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import compare, compare_grad

pytestmark = pytest.mark.usefixtures("no_fallback")

X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
NAN = torch.tensor([[1.0, math.nan, 3.0], [4.0, 2.0, -math.inf]])
TIES = torch.tensor([[2, 7, 7, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "amax", "amin", "nansum", "logsumexp", "var", "std", "norm"])
@pytest.mark.parametrize("dim", [None, 0, -1, (0, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_reduction(name, dim, keepdim):
    if (dim is None and name in ("prod", "logsumexp", "amax")) or (name == "prod" and isinstance(dim, tuple)):
        dim = 1
    fn = getattr(torch, name)
    options = {} if dim is None and name in ("sum", "mean", "nansum") else {"dim": dim, "keepdim": keepdim}
    compare(lambda x: fn(x, **options), X, rtol=1e-5)
    compare_grad(lambda x: fn(x, **options), X)


def test_integers_and_bools():
    x = torch.arange(6).reshape(2, 3)
    compare(torch.sum, torch.tensor([True, True, False]))
    compare(torch.sum, torch.tensor([200, 100], dtype=torch.uint8))
    compare(torch.prod, x.to(torch.int32) + 1)
    compare(lambda x: x.sum(dtype=torch.float32), x)
    compare(lambda x: x.cumsum(0), x.to(torch.int8))
    compare(lambda x: x.mean(dtype=torch.float64), x)
    with pytest.raises(RuntimeError, match=r"could not infer output dtype|mean"):
        x.to("tpu").mean()


def test_narrow_floats_accumulate_wide():
    compare(torch.sum, torch.ones(5000, dtype=torch.bfloat16), rtol=0, atol=0)
    compare(lambda x: x.mean(0), torch.randn(512, 3).bfloat16(), rtol=1e-2, atol=1e-3)


def test_variance_options():
    for correction in (0, 1, 2, 0.5):
        compare(lambda x: torch.var(x, dim=1, correction=correction), X)
    compare(lambda x: torch.std_mean(x, dim=(0, 1)), X)
    compare(lambda x: torch.var_mean(x, unbiased=False), X)
    compare(lambda x: x.var(0), torch.randn(4, dtype=torch.complex64))
    compare_grad(lambda x: torch.std(x, dim=1, correction=0), X)


def test_extremes():
    for x in (X, NAN, TIES, TIES > 0):
        compare(lambda x: (x.max(), x.min()), x, rtol=0)
        compare(lambda x: (x.amax(0), x.amin(-1, keepdim=True)), x, rtol=0)
        compare(lambda x: torch.aminmax(x, dim=0), x, rtol=0)
    for x in (X, NAN, TIES):
        compare(lambda x: (tuple(x.max(0)), tuple(x.min(-1, keepdim=True))), x, rtol=0)
        compare(lambda x: (x.argmax(), x.argmin(0), x.argmax(-1, keepdim=True), x.argmax(keepdim=True)), x)
    compare_grad(lambda x: x.max(1)[0], X)
    compare_grad(lambda x: x.amax((0, 1)), X)
    compare(lambda x: tuple(x.max(0)), torch.tensor(3.0))
    with pytest.raises(IndexError, match="Expected reduction dim"):
        torch.empty(0, device="tpu").argmax(0)


def test_any_and_all():
    x = torch.tensor([[0, 1], [2, 3]])
    for fn in (torch.any, torch.all):
        compare(fn, x)
        compare(lambda x: fn(x, dim=0), x)
        compare(lambda x: fn(x, dim=(0, 1), keepdim=True), x)
        compare(fn, x.to(torch.uint8))
        compare(fn, torch.empty(0))
    compare(lambda x: torch.count_nonzero(x, dim=1), x)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 0.5, math.inf, -math.inf])
def test_norms(order):
    compare(lambda x: torch.linalg.vector_norm(x, order, dim=1), X, rtol=2e-5)
    compare(lambda x: torch.linalg.vector_norm(x, order), X + 1j * X, rtol=2e-5)
    compare(lambda x: torch.linalg.vector_norm(x, order, dtype=torch.float64), X)
    compare(lambda x: torch.norm(x.bfloat16(), order), X, rtol=1e-2)


def test_running():
    for dim in (0, -1):
        compare(lambda x: x.cumsum(dim), X)
        compare(lambda x: x.cumprod(dim), X)
        compare(lambda x: torch.logcumsumexp(x, dim), X)
        for x in (X, NAN, TIES):
            compare(lambda x: tuple(torch.cummax(x, dim)) + tuple(torch.cummin(x, dim)), x, rtol=0)
    compare_grad(lambda x: x.cumsum(1) * x, X)
    compare_grad(lambda x: torch.logcumsumexp(x, 0), X)
    compare(lambda x: x.cumsum(0), torch.tensor(2.0))


def test_histograms():
    x = torch.randn(50)
    compare(lambda x: torch.histc(x, 10, -2, 2), x)
    compare(lambda x: torch.histc(x, 7), x)
    # Integers are counted too, as on CUDA (the CPU refuses them).
    whole = torch.tensor([0, 1, 1, 3, 3, 5], dtype=torch.int32, device="tpu")
    assert torch.histc(whole, 4, 0, 3).tolist() == [1, 2, 0, 2]
    compare(lambda x: tuple(torch.histogram(x, 5, range=(-1.0, 1.0), density=True)), x)
    compare(lambda x: torch.bincount(x, minlength=6), torch.tensor([1, 1, 3]))
    compare(lambda x, w: torch.bincount(x, w), torch.tensor([1, 1, 3]), torch.tensor([0.5, 1.0, 2.0]))


def test_empty():
    x = torch.empty(0, 3)
    compare(lambda x: (x.sum(), x.sum(0), x.mean(1), x.prod(), x.any(0)), x)
