"""Resizing and sampling at real positions against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

r = torch.randn

SETTINGS = [
    {"scale_factor": 1.5, "mode": "bilinear"}, {"scale_factor": 1.5, "mode": "bilinear", "align_corners": True},
    {"size": (5, 2), "mode": "bilinear"}, {"size": (5, 7), "mode": "bicubic"}, {"scale_factor": 0.7, "mode": "bicubic"},
    {"scale_factor": 2.0, "mode": "nearest"}, {"scale_factor": 1.3, "mode": "nearest"},
    {"size": 5, "mode": "nearest-exact"}, {"size": (7, 2), "mode": "area"},
    {"size": (9, 10), "mode": "bilinear", "antialias": True}, {"size": (2, 2), "mode": "bicubic", "antialias": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_two_dimensions(settings, no_fallback):
    compare(lambda t: F.interpolate(t, **settings), r(2, 3, 6, 5), rtol=1e-4, atol=1e-5)
    compare_grad(lambda t: F.interpolate(t, **settings).pow(2), r(2, 3, 6, 5), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("mode", "shape"), [("linear", (1, 3, 5)), ("trilinear", (1, 3, 5, 4, 3)),
                                             ("nearest", (1, 3, 5, 4, 3)), ("nearest-exact", (1, 3, 5))])
def test_other_ranks(mode, shape, no_fallback):
    compare_grad(lambda t: F.interpolate(t, scale_factor=1.7, mode=mode).pow(2), r(shape), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(mode, padding, no_fallback):
    grid = torch.rand(2, 5, 6, 2) * 2.4 - 1.2
    compare(lambda t, g: F.grid_sample(t, g, mode, padding, False), r(2, 3, 8, 7), grid, rtol=1e-4, atol=1e-4)
    compare_grad(lambda t, g: F.grid_sample(t, g, mode, padding, True), r(2, 3, 8, 7), grid, rtol=1e-3, atol=1e-3)
