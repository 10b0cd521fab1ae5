"""Kernels of the Hub (library `kernels`, build variant torch-tpu) from a folder, one in JAX and one in Pallas: eager,
compiled, gradient, under kernelize, and compiled for TPU chips."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from conftest import compare, compare_grad
from torch_tpu import aot

kernels = pytest.importorskip("kernels", reason="the extra [kernels] is not installed")

HUB = Path(__file__).parent / "hub"
on_linux = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                              reason="libtpu is for Linux on x86-64")


@kernels.use_kernel_forward_from_hub("RMSNorm")
class RMSNorm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@kernels.use_kernel_forward_from_hub("SiluAndMul")
class SiluAndMul(torch.nn.Module):
    def forward(self, x):
        first, second = x.chunk(2, -1)
        return F.silu(first) * second


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.act, self.down = RMSNorm(128), torch.nn.Linear(128, 512), SiluAndMul(), \
            torch.nn.Linear(256, 128)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def layer(folder, name):
    return kernels.LocalLayerRepository(HUB / folder, layer_name=name)


MAPPING = {"RMSNorm": {"tpu": layer("rms-norm", "RMSNorm")}, "SiluAndMul": {"tpu": layer("silu-and-mul", "SiluAndMul")}}


@pytest.fixture(autouse=True)
def fresh(no_fallback):
    torch._dynamo.reset()


@pytest.fixture(scope="module", params=["rms-norm", "silu-and-mul"])
def kernel(request):
    """(the kernel's function, the same in PyTorch, arguments)"""
    loaded = kernels.get_local_kernel(HUB / request.param)
    torch.manual_seed(0)
    x = torch.randn(3, 300, 256)
    if request.param == "rms-norm":
        return loaded.rms_norm, lambda x, w, eps: F.rms_norm(x, w.shape, w, eps), (x, torch.randn(256), 1e-5)
    return loaded.silu_and_mul, lambda x, y: F.silu(x) * y, (x, torch.randn_like(x))


def _either(kernel):
    ours, torchs, _ = kernel
    return lambda *args: (ours if args[0].device.type == "tpu" else torchs)(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager(kernel, dtype):
    arguments = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in kernel[2]]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    compare(_either(kernel), *arguments, rtol=tolerance, atol=tolerance)


def test_gradient(kernel):
    compare_grad(lambda *args: _either(kernel)(*args).square(), *kernel[2], rtol=1e-3, atol=1e-3)


def test_compiled(kernel):
    compiled = torch.compile(lambda *args: kernel[0](*args) * 2, fullgraph=True)
    compare(lambda *args: compiled(*args) if args[0].is_tpu else kernel[1](*args) * 2, *kernel[2])
    compare_grad(lambda *args: compiled(*args) if args[0].is_tpu else kernel[1](*args) * 2, *kernel[2], rtol=1e-3,
                 atol=1e-3)


@on_linux
@pytest.mark.parametrize("topology", ["v5e-1", "v6e-1"])
def test_for_a_chip(kernel, topology):
    def step(*arguments):
        tensors = [a.requires_grad_() for a in arguments if isinstance(a, torch.Tensor)]
        out = kernel[0](*arguments)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)

    arguments = tuple(a.bfloat16() if isinstance(a, torch.Tensor) else a for a in kernel[2])
    made = aot.compile(step, arguments, topology)
    assert made.report.fits and not made.report.host_transfers and made.executable
    if "silu" in kernel[0].name:
        assert made.hlo.count('custom_call_target="tpu_custom_call"') == 2  # Mosaic's, forward and backward


def kernelized(mode):
    model = Block().to("tpu")
    with kernels.use_kernel_mapping(MAPPING):
        return kernels.kernelize(model, mode=mode, device="tpu")


def test_kernelize_for_inference():
    x = torch.randn(2, 5, 128)
    model = kernelized(kernels.Mode.INFERENCE)
    assert model.act.forward.__func__.__module__ == "_silu_and_mul_tpu_1.layers"
    with torch.no_grad():
        torch.testing.assert_close(model(x.to("tpu")).cpu(), Block()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_kernelize_for_training(compiled):
    x, grads = torch.randn(2, 5, 128), []
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE if compiled else kernels.Mode.TRAINING
    for model in (Block(), kernelized(mode)):
        place = next(model.parameters()).device
        run = torch.compile(model, fullgraph=True) if compiled and place.type == "tpu" else model
        run(x.to(place)).square().mean().backward()
        grads.append([p.grad.cpu() for p in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-5)


def test_kernelize_leaves_other_devices_alone():
    with kernels.use_kernel_mapping(MAPPING):
        model = kernels.kernelize(Block(), mode=kernels.Mode.INFERENCE, device="cpu")
    assert model.act.forward.__func__ is SiluAndMul.forward


@on_linux
def test_a_kernelized_model_for_a_chip():
    model = kernelized(kernels.Mode.INFERENCE).bfloat16()
    made = aot.compile(model, torch.empty(8, 128, dtype=torch.bfloat16), "v5e-1")
    assert made.report.fits and made.hlo.count('custom_call_target="tpu_custom_call"') == 1


def test_training_step_with_kernels():
    losses = []
    x = torch.randn(4, 128)
    for model in (Block(), kernelized(kernels.Mode.TRAINING)):
        place = next(model.parameters()).device
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = torch.tpu.compile_step(step) if place.type == "tpu" else step
        losses.append([run(x.to(place)).item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_local_kernels_stand_for_those_of_the_hub():
    """LOCAL_KERNELS names a folder for a repository, and get_kernel asks nobody else."""
    code = ("import torch, kernels; k = kernels.get_kernel('someone/rms-norm', version=1, trust_remote_code=True); "
            "x = torch.randn(2, 8, device='tpu'); print(k.rms_norm(x, x[0], 1e-5).shape)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "LOCAL_KERNELS": f"someone/rms-norm={HUB / 'rms-norm'}",
                               "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0 and "torch.Size([2, 8])" in done.stdout, done.stderr[-2000:]
