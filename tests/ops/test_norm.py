"""Normalisation against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

r = torch.randn

CASES = {
    "layer": (lambda x, w, b: F.layer_norm(x, (4,), w, b), ((2, 3, 4), (4,), (4,))),
    "layer over two": (lambda x: F.layer_norm(x, (3, 4)), ((2, 3, 4),)),
    "rms": (lambda x, w: F.rms_norm(x, (4,), w), ((2, 3, 4), (4,))),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 5, 5), (4,), (4,))),
    "instance": (lambda x, w, b: F.instance_norm(x, None, None, w, b), ((4, 3, 5), (3,), (3,))),
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), ((4, 3, 5), (3,), (3,))),
    "local response": (lambda x: F.local_response_norm(x, 2), ((2, 4, 5, 5),)),
    "weight": (lambda v, g: torch._weight_norm(v, g, 0), ((4, 3, 2), (4, 1, 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_norms(name, no_fallback):
    fn, shapes = CASES[name]
    args = [r(s) for s in shapes]
    compare(fn, *args, rtol=1e-4, atol=1e-5)
    compare_grad(lambda *a: fn(*a).pow(2), *args, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["layer", "rms", "group", "batch"])
def test_bfloat16(name, no_fallback):
    fn, shapes = CASES[name]
    compare(fn, *(r(s).bfloat16() for s in shapes), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics(training, no_fallback):
    def fn(x, mean, var):
        out = F.batch_norm(x, mean, var, training=training, momentum=0.3)
        return out, mean, var

    compare(fn, r(4, 3, 5), r(3), torch.rand(3) + 0.1, rtol=1e-4, atol=1e-5)


def test_batch_norm_module_learns(no_fallback):
    results = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm2d(3).to(device)
        x = r(4, 3, 2, 2).to(device)
        norm(x).pow(3).sum().backward()
        results.append([norm.weight.grad.cpu(), norm.running_mean.cpu(), norm.eval()(x).detach().cpu()])
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
