"""Optimiser steps (plain, foreach, fused), loss scaling, and the foreach operators."""

from __future__ import annotations

import pytest
import torch

from conftest import compare

pytestmark = pytest.mark.usefixtures("no_fallback")


def train(device: str, make, dtype: torch.dtype = torch.float32, steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device))
                  for shape in ((3, 4), (4,), ())]
    gradients = [[torch.randn(p.shape, generator=generator).to(dtype) for p in parameters] for _ in range(steps)]
    optimizer = make(parameters)
    for step in gradients:
        for p, g in zip(parameters, step):
            p.grad = g.to(device)
        optimizer.step()
    return [p.detach().cpu() for p in parameters]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta",
                                  "Rprop", "ASGD"])
@pytest.mark.parametrize("form", ["for-loop", "foreach", "fused"])
def test_optimizers(kind, form):
    if form == "fused" and kind not in ("SGD", "Adam", "AdamW", "Adagrad"):
        pytest.skip("has no fused form")
    options = {"foreach": form == "foreach"}
    if form == "fused":
        options = {"fused": True}
    if kind in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    if kind in ("Adam", "AdamW", "SGD", "Adagrad"):
        options["weight_decay"] = 0.05
    if kind in ("Adam", "AdamW"):
        options["amsgrad"] = True
    make = getattr(torch.optim, kind)
    want, got = (train(device, lambda p: make(p, lr=0.01, **options)) for device in ("cpu", "tpu"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_bfloat16(form):
    want, got = (train(device, lambda p: torch.optim.AdamW(p, lr=0.01, **{form: True}), torch.bfloat16)
                 for device in ("cpu", "tpu"))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_learning_rate_is_an_argument():
    """A schedule must not compile a step per learning rate."""
    from torch_tpu.eager import execute

    p = torch.nn.Parameter(torch.ones(3, device="tpu"))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    counts = []
    for _ in range(4):
        p.grad = torch.ones(3, device="tpu")
        optimizer.step()
        schedule.step()
        counts.append(execute.cached())
    assert counts[-1] == counts[1]


def test_tensor_learning_rate():
    want, got = (train(device, lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, device=device), fused=True))
                 for device in ("cpu", "tpu"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_loss_scaling():
    def scale(grads, found, inverse, scaler, tracker):
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        torch._amp_update_scale_(scaler, tracker, found, 2.0, 0.5, 2)
        return [*grads, found, scaler, tracker]

    for bad in (1.0, float("inf")):
        for growth in (0, 1):
            compare(scale, [torch.tensor([2.0, 4.0]), torch.tensor([bad])], torch.zeros(1), torch.tensor([0.5]),
                    torch.tensor([8.0]), torch.tensor([growth], dtype=torch.int32))


def test_step_is_skipped_after_overflow():
    p = torch.nn.Parameter(torch.ones(3, device="tpu"))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.full((), 2.0, device="tpu"), torch.ones((), device="tpu")
    p.grad = torch.ones(3, device="tpu")
    optimizer.step()
    assert torch.equal(p.detach().cpu(), torch.ones(3))


def lists(count: int = 2) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.rand(shape, generator=generator) + 0.5 for shape in ((2, 3), (4,))] for _ in range(count)]


@pytest.mark.parametrize("name", ["abs", "exp", "sqrt", "neg", "reciprocal", "sigmoid", "tanh", "log", "rsqrt", "sign",
                                  "floor", "round", "erf", "lgamma", "cos"])
def test_foreach_unary(name):
    compare(getattr(torch, f"_foreach_{name}"), lists()[0], rtol=2e-5)

    def in_place(xs):
        getattr(torch, f"_foreach_{name}_")(xs)
        return xs

    compare(in_place, lists()[0], rtol=2e-5)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow"])
def test_foreach_binary(name):
    fn = getattr(torch, f"_foreach_{name}")
    a, b = lists()
    compare(fn, a, b)
    compare(lambda a: fn(a, 0.75), a)
    compare(lambda a: fn(a, [0.75, 2.0]), a)


def test_foreach_rest():
    a, b, c = lists(3)
    compare(lambda a, b, c: torch._foreach_addcmul(a, b, c, value=0.5), a, b, c)
    compare(lambda a, b, c: torch._foreach_addcdiv(a, b, c, [0.5, 2.0]), a, b, c)
    compare(lambda a, b, c: torch._foreach_addcdiv(a, b, c, torch.tensor([0.5, 2.0])), a, b, c)
    compare(lambda a, b: torch._foreach_lerp(a, b, 0.3), a, b)
    compare(lambda a, b, c: torch._foreach_lerp(a, b, c), a, b, c)
    compare(lambda a, b: torch._foreach_add(a, b, alpha=2), a, b)
    compare(lambda a: torch._foreach_mul(a, torch.tensor(3.0, device=a[0].device)), a)
    compare(lambda a: torch._foreach_norm(a), a)
    compare(lambda a: torch._foreach_norm(a, float("inf")), a)
    compare(lambda a: torch._foreach_max(a), a)
    compare(lambda a: torch._foreach_pow(2.0, a), a)
    compare(lambda a: torch.nn.utils.get_total_norm(a), a)
