"""Pooling against the CPU: values, indices and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

r = torch.randn

CASES = {
    "max": (lambda t: F.max_pool2d(t, 3, 2, 1, return_indices=True), (2, 3, 11, 9)),
    "max, ceil": (lambda t: F.max_pool2d(t, 3, 2, 1, ceil_mode=True, return_indices=True), (2, 3, 11, 9)),
    "max, dilation": (lambda t: F.max_pool2d(t, 2, 1, 0, dilation=2), (2, 3, 11, 9)),
    "max, large window": (lambda t: F.max_pool2d(t, 9, 1, return_indices=True), (2, 3, 11, 9)),
    "max 1d": (lambda t: F.max_pool1d(t, 3, 2, 1), (2, 3, 11)),
    "max 3d": (lambda t: F.max_pool3d(t, (2, 3, 2), 2, 1, return_indices=True), (2, 3, 5, 6, 7)),
    "average": (lambda t: F.avg_pool2d(t, 3, 2, 1, count_include_pad=False), (2, 3, 11, 9)),
    "average, ceil": (lambda t: F.avg_pool2d(t, 3, 2, 1, ceil_mode=True), (2, 3, 11, 9)),
    "average 1d": (lambda t: F.avg_pool1d(t, 3, 2, 1), (2, 3, 11)),
    "average 3d": (lambda t: F.avg_pool3d(t, 3, 2, 1, divisor_override=5), (1, 2, 5, 6, 7)),
    "adaptive average": (lambda t: F.adaptive_avg_pool2d(t, (4, 3)), (2, 3, 11, 9)),
    "adaptive average 3d": (lambda t: F.adaptive_avg_pool3d(t, (2, 4, 3)), (1, 2, 3, 11, 9)),
    "adaptive maximum": (lambda t: F.adaptive_max_pool2d(t, (4, 3), return_indices=True), (2, 3, 11, 9)),
    "adaptive maximum 3d": (lambda t: F.adaptive_max_pool3d(t, (2, 4, 3)), (1, 2, 3, 11, 9)),
    "fractional": (lambda t: F.fractional_max_pool2d(
        t, (2, 3), output_size=(4, 5), return_indices=True,
        _random_samples=torch.full((2, 3, 2), 0.3, device=t.device)), (2, 3, 11, 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_pools(name, no_fallback):
    fn, shape = CASES[name]
    x = r(shape) - 5
    compare(fn, x)

    def values(t):
        out = fn(t)
        return (out[0] if isinstance(out, tuple) else out).pow(2)

    compare_grad(values, x)


def test_padding_never_wins(no_fallback):
    compare(lambda t: F.max_pool2d(t, 3, 2, 1, return_indices=True), torch.full((1, 1, 5, 5), -torch.inf))


def test_unpool(no_fallback):
    x = r(2, 3, 11, 9)
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    compare(lambda v, i: F.max_unpool2d(v, i, 2, output_size=(11, 9)), values, indices)
