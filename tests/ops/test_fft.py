"""Fourier transforms against the CPU."""

from __future__ import annotations

import pytest
import torch

from conftest import compare, compare_grad


@pytest.mark.parametrize("norm", [None, "ortho", "forward"])
@pytest.mark.parametrize("name", ["fft", "ifft", "fft2", "fftn", "ifftn", "hfft", "rfft", "rfft2", "rfftn", "irfft",
                                  "irfftn"])
def test_transforms(name, norm, no_fallback):
    def fn(x):
        return getattr(torch.fft, name)(x, norm=norm)

    x = torch.randn(3, 4, 6)
    if name in ("fft", "rfft", "ifft", "fftn", "rfftn"):
        compare_grad(lambda t: fn(t).abs(), x, rtol=1e-3, atol=1e-4)
    compare(fn, x if name != "irfft" else torch.randn(3, 4, 6, dtype=torch.complex64), rtol=1e-4, atol=1e-4)


def test_four_dimensions(no_fallback):
    compare(torch.fft.fftn, torch.randn(2, 3, 4, 5, 2), rtol=1e-4, atol=1e-4)


def test_short_time(no_fallback):
    def fn(x):
        window = torch.hann_window(16, device=x.device)
        return torch.istft(torch.stft(x, 16, window=window, return_complex=True), 16, window=window)

    compare(fn, torch.randn(2, 64), rtol=1e-4, atol=1e-4)
