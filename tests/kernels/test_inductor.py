"""What torch's Inductor generates for the device through Pallas, when it is asked for by hand (torch 2.13)."""

from __future__ import annotations

import platform
import sys

import jax
import jax.numpy as jnp
import pytest
import torch

from torch_tpu import aot
from torch_tpu._internal.pallas import tpu_torch_pallas
from torch_tpu.aot.tracing import Argument, Program
from torch_tpu.custom import modules
from torch_tpu.runtime import jax_door


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    modules._kernels.clear()
    modules._programs.clear()


def exported(fn, *shapes):
    return jax.export.export(jax.jit(fn), platforms=["cpu"])(*shapes).mlir_module_serialized


def test_a_module_runs():
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert not tpu_torch_pallas.lookup_custom_kernel("k", "2x3")
    tpu_torch_pallas.register_custom_kernel("k", "2x3", serialized_mlir_module=exported(
        lambda x, y: (x + y, x * 2), shape, shape))
    assert tpu_torch_pallas.lookup_custom_kernel("k", "2x3")
    x = torch.arange(6.0, device="tpu").view(3, 2).t()
    like = torch.empty(2, 3, device="tpu")
    total, twice = tpu_torch_pallas.call_custom_kernel("k", "2x3", inputs=[x, x], output_shapes=[like, like],
                                                       donate_argnums=[0])
    assert total.tolist() == twice.tolist() == (x * 2).tolist()
    with pytest.raises(ValueError, match="takes 2 arrays, and 1 were given"):
        modules._programs.clear()
        tpu_torch_pallas.call_custom_kernel("k", "2x3", inputs=[x], output_shapes=[like, like])
    with pytest.raises(KeyError, match="not registered"):
        tpu_torch_pallas.call_custom_kernel("k", "other", inputs=[x], output_shapes=[like])


def inductor(fn, *args):
    from torch._inductor.compile_fx import compile_fx

    return torch.compile(fn, backend=lambda graph, inputs: compile_fx(graph, inputs))(*args)


def test_inductor_on_virtual_chips():
    width = jax.config.jax_enable_x64
    x = torch.randn(16, 128, device="tpu")
    with pytest.raises(NotImplementedError, match="virtual chips"):
        inductor(lambda x: torch.sin(x) + 1, x)
    assert jax.config.jax_enable_x64 == width


@pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                    reason="libtpu is for Linux on x86-64")
def test_inductors_kernel_compiles_for_a_chip():
    with pytest.raises(NotImplementedError):
        inductor(lambda x: torch.sin(x) + 1, torch.randn(16, 128, device="tpu"))
    (serialized,) = modules._kernels.values()
    text = jax_door.module_bytes(jax_door.parse_module(serialized))
    shape = ((16, 128), "float32", 16 * 128 * 4, False)
    program = Program("inductor", text, (Argument("out", *shape), Argument("x", *shape)), 0.0)
    made = aot.compile_program(program, "v5e-1")
    assert made.report.fits and "tpu_custom_call" in made.hlo
