"""Tensors made from numbers."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("no_fallback")


def same(fn, exact: bool = True) -> None:
    want, got = fn(device="cpu"), fn(device="tpu")
    assert got.device.type == "tpu"
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got.cpu(), want, **tolerance)


@pytest.mark.parametrize("arguments", [(5,), (2, 9), (0, 10, 3), (10, 0, -3), (0.5, 3), (0, 1, 0.1), (3, 3)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int32, torch.bfloat16])
def test_arange(arguments, dtype):
    same(lambda device: torch.arange(*arguments, dtype=dtype, device=device))


@pytest.mark.parametrize("arguments", [(0, 1, 5), (-3, 50, 1), (1, 50, 50), (50, 1, 50), (0.3, 7.7, 12), (1, 1, 0)])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int64])
def test_linspace(arguments, dtype):
    same(lambda device: torch.linspace(*arguments, dtype=dtype, device=device), dtype == torch.int64)
    if dtype != torch.int64:
        same(lambda device: torch.logspace(0, 2, 5, dtype=dtype, device=device), exact=False)


def test_constants():
    for fn in (torch.zeros, torch.ones):
        same(lambda device: fn(2, 3, device=device))
        same(lambda device: fn(0, dtype=torch.bool, device=device))
    same(lambda device: torch.full((2, 2), 3, device=device))
    same(lambda device: torch.full((2,), 1.5, dtype=torch.bfloat16, device=device))
    same(lambda device: torch.full((), True, device=device))
    same(lambda device: torch.zeros(2, 3, device=device).new_full((2,), 7))
    same(lambda device: torch.full_like(torch.zeros(2, dtype=torch.int64, device=device), 4))
    same(lambda device: torch.ones_like(torch.zeros(2, device=device), dtype=torch.int8))
    same(lambda device: torch.scalar_tensor(2.5, device=device))
    same(lambda device: torch.tensor([[1, 2], [3, 4]], device=device).fill_(9).zero_())


def test_matrices():
    same(lambda device: torch.eye(3, device=device))
    same(lambda device: torch.eye(2, 4, dtype=torch.int64, device=device))
    same(lambda device: torch.arange(12, device=device).view(3, 4).tril(-1))
    same(lambda device: torch.ones(2, 3, 3, dtype=torch.bool, device=device).triu(1))
    same(lambda device: torch.tril_indices(3, 4, 1, device=device))
    same(lambda device: torch.triu_indices(4, 3, -1, device=device))


def test_wrong_arguments_say_what_torch_says():
    with pytest.raises(RuntimeError, match="upper bound and lower bound inconsistent"):
        torch.arange(0, 5, -1, device="tpu")
    with pytest.raises(RuntimeError, match="number of steps must be non-negative"):
        torch.linspace(0, 1, -1, device="tpu")
