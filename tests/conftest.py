"""Helpers of every test: a device tensor's result against CPU PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree


def on_tpu(value: Any) -> Any:
    """Tensors of a nested structure, copied to the device; other things as they are."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.clone().to("tpu"), value)


def compare(fn: Callable[..., Any], *args: Any, rtol: float = 1e-5, atol: float = 1e-6) -> Any:
    """Runs fn on CPU copies and on device copies; every tensor it returns must agree in device, dtype, shape, value."""
    want = fn(*pytree.tree_map_only(torch.Tensor, torch.clone, args))
    got = fn(*on_tpu(args))
    wanted, gotten = pytree.tree_leaves(want), pytree.tree_leaves(got)
    assert len(wanted) == len(gotten)
    for w, g in zip(wanted, gotten):
        if not isinstance(w, torch.Tensor):
            assert g == w
            continue
        assert g.device.type == "tpu"
        torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=rtol, atol=atol, equal_nan=True)
    return got


def compare_grad(fn: Callable[..., torch.Tensor], *args: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Gradients of fn's summed result with respect to every floating tensor argument, against the CPU's."""
    grads = []
    for place in (lambda t: t.detach().clone(), lambda t: t.detach().clone().to("tpu")):
        leaves = [place(a).requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in args]
        fn(*leaves).sum().backward()
        grads.append([leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad])
    for want, got in zip(*grads):
        assert got is not None and got.device.type == "tpu"
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=atol)


@pytest.fixture
def no_fallback():
    """An operator that would run on the CPU fails the test."""
    from torch_tpu.eager import fallback

    before = fallback.mode()
    fallback.set_mode("error")
    yield
    fallback.set_mode(before)


@pytest.fixture(autouse=True)
def integers_on_the_device(request):
    """Operators (tests/ops) are tested on the device: integers that the host knows would be computed on the CPU, which
    is the oracle itself."""
    if "ops" not in request.path.parts:
        yield
        return
    from torch_tpu.eager import bookkeeping

    before = bookkeeping.set(False)
    yield
    bookkeeping.set(before)
