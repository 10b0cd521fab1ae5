"""Convolutions against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

r = torch.randn

CASES = {
    "stride and padding": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), ((2, 4, 7, 8), (6, 4, 3, 3), (6,))),
    "groups and dilation": (lambda x, w, b: F.conv2d(x, w, b, 1, 1, 2, 2), ((2, 4, 7, 8), (6, 2, 3, 3), (6,))),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=4), ((2, 4, 7, 8), (4, 1, 3, 3))),
    "same": (lambda x, w: F.conv1d(x, w, padding="same"), ((2, 4, 7), (6, 4, 3))),
    "three dimensions": (F.conv3d, ((2, 4, 5, 5, 5), (6, 4, 3, 3, 3))),
    "no batch": (F.conv1d, ((4, 7), (6, 4, 3))),
    "transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2, 2), ((2, 4, 5, 6), (4, 3, 3, 3), (6,))),
    "transposed 1d": (lambda x, w: F.conv_transpose1d(x, w, stride=3), ((2, 4, 5), (4, 3, 2))),
}


@pytest.mark.parametrize("name", CASES)
def test_convolutions(name, no_fallback):
    fn, shapes = CASES[name]
    args = [r(s) for s in shapes]
    compare(fn, *args, rtol=1e-4, atol=1e-5)
    compare_grad(fn, *args, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats(dtype, no_fallback):
    compare(F.conv2d, r(2, 4, 7, 8).to(dtype), r(6, 4, 3, 3).to(dtype), r(6).to(dtype), rtol=2e-2, atol=2e-2)


def test_only_the_gradients_asked_for(no_fallback):
    x, w = r(1, 2, 5, 5, device="tpu"), r(3, 2, 3, 3, device="tpu", requires_grad=True)
    F.conv2d(x, w).sum().backward()
    assert x.grad is None and w.grad.shape == w.shape
