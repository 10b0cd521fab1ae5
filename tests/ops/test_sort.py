"""Sorting, order statistics, searching, distinct elements."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import compare, compare_grad

pytestmark = pytest.mark.usefixtures("no_fallback")

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
NAN = torch.tensor([3.0, math.nan, -1.0, math.inf, 0.0, -0.0, math.nan, -math.inf])
TIES = torch.tensor([[3, 1, 3, 2, 1], [0, 0, 0, 5, 5]])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("x", [X, NAN, TIES, TIES > 1, X.bfloat16(), TIES.to(torch.uint8)])
def test_stable_sort(x, descending):
    compare(lambda x: tuple(torch.sort(x, stable=True, descending=descending)), x, rtol=0, atol=0)
    compare(lambda x: tuple(torch.sort(x, dim=0, stable=True, descending=descending)), x, rtol=0, atol=0)


def test_sort_gradient_and_0d():
    compare_grad(lambda x: x.sort(0)[0] * torch.arange(6, device=x.device), X)
    compare(lambda x: tuple(x.sort()), torch.tensor(1.0))
    compare(lambda x: x.argsort(stable=True), TIES)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("x", [X, NAN, X.bfloat16(), X.double(), torch.arange(10).flip(0)])
def test_topk(x, largest):
    compare(lambda x: torch.topk(x, 3, largest=largest)[0], x, rtol=0, atol=0)
    got = torch.topk(x.to("tpu"), 3, largest=largest)
    torch.testing.assert_close(x.gather(-1, got[1].cpu()), got[0].cpu(), equal_nan=True)


def test_topk_dim_and_gradient():
    compare(lambda x: tuple(torch.topk(x, 2, dim=0)), X)
    compare_grad(lambda x: torch.topk(x, 2, dim=-1)[0], X)


def test_order_statistics():
    for x in (X, X.abs()):
        compare(lambda x: (x.median(), tuple(x.median(1)), tuple(x.kthvalue(2, 0))), x)
        compare(lambda x: (torch.quantile(x, 0.3, dim=1), torch.nanquantile(x, torch.tensor([0.1, 0.9]).to(x.device))),
                x)
    compare(lambda x: (x.median(), x.nanmedian()), NAN)
    compare(lambda x: x.mode(-1)[0], TIES)


def test_search():
    edges = torch.tensor([1.0, 2.0, 2.0, 5.0])
    values = torch.tensor([0.0, 1.0, 2.0, 3.0, 5.0, 9.0, math.nan])
    for right in (False, True):
        compare(lambda e, v: torch.searchsorted(e, v, right=right), edges, values)
        compare(lambda e, v: torch.bucketize(v, e, right=right, out_int32=True), edges, values)
        compare(lambda e: torch.searchsorted(e, 2.0, right=right), edges)
    compare(torch.searchsorted, torch.sort(X)[0], X)
    order = torch.argsort(edges.flip(0))
    compare(lambda e, v, o: torch.searchsorted(e, v, sorter=o), edges.flip(0), values, order)


def test_distinct():
    compare(lambda x: torch.unique(x, return_inverse=True, return_counts=True), TIES)
    compare(lambda x: torch.unique_consecutive(x.flatten(), return_counts=True), TIES)
    compare(lambda x: torch.unique(x, dim=0), torch.tensor([[2, 1], [1, 5], [2, 1]]))
