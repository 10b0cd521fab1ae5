"""Programs that overflow a memory of the chip: which one, by how much, and what to do."""

import platform
import sys

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_tpu import aot
from torch_tpu.aot import fitting, overflow, topology
from torch_tpu.runtime import errors

on_linux = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                              reason="libtpu is for Linux on x86-64")


def _double(x, out, *scratch):
    for each in scratch:
        each[0] = 1
    out[...] = x[...] * 2


def double(rows, scalars=0):
    """A kernel with blocks of so many rows of 16 KiB, each there four times, and so many scalars."""
    @torch.tpu.pallas.jax_op(f"tests::double_{rows}_{scalars}")
    def op(x: jax.Array) -> jax.Array:
        block = pl.BlockSpec((rows, 4096), lambda i: (i, 0))
        return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(x.shape[0] // rows,),
                              in_specs=[block], out_specs=block,
                              scratch_shapes=[pltpu.SMEM((scalars,), jnp.int32)] if scalars else [])(x)
    return op


@on_linux
def test_blocks_of_a_kernel_that_are_too_large():
    made = aot.compile(double(1024), torch.empty(4096, 4096, device="meta"), "v5e-1")
    report = made.report
    assert not report.fits and not made.executable
    assert report.lacking == "scoped VMEM" and "it needs 64.00 MiB of scoped VMEM, in the kernel" in report.problem
    assert "16.00 MiB are there" in report.problem and "vmem_limit_bytes" in str(report)
    assert "HBM" not in report.problem and "blocks" in report.advice[0]
    assert aot.compile(double(128), torch.empty(4096, 4096, device="meta"), "v5e-1").report.fits


@on_linux
def test_scalars_of_a_kernel_that_are_too_many():
    report = aot.compile(double(8, 1 << 20), torch.empty(64, 4096, device="meta"), "v5e-1").report
    assert not report.fits and report.lacking == "SMEM" and "needs 4.00 MiB of SMEM" in report.problem
    assert "scalars" in report.advice[0]


def test_a_kernel_cannot_be_divided():
    with pytest.raises(errors.CaptureError, match="has a Pallas kernel, which XLA cannot divide among chips"):
        aot.trace(double(8), torch.empty(64, 4096), mesh={"dp": 4})


LISTED = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space {0}. Used 20.50G of \
15.75G {0}. Exceeded {0} capacity by 4.75G.

Program {0} requirement 20.50G:
    {1}

  Largest program allocations in {0}:

  1. Size: 16.00G
     Operator: op_name="jit(step)/model.layers.3.mlp/dot_general"
     Shape: f32[65536,65536]{{1,0:T(8,128)}}
     Unpadded size: 16.00G
     XLA label: fusion.12 = fusion(p0, p1), kind=kOutput
     Allocation type: HLO temp
     ==========================

  2. Size: 4.00G
     Shape: f32[32768,32768]{{1,0:T(8,128)}}
     Tag: something else
     XLA label: copy.1 = copy(p0)
     Allocation type: HLO temp
     ==========================
"""


@pytest.mark.parametrize("text, memory, needed, limit", [
    (LISTED.format("hbm", "HLO temp"), "HBM", int(20.5 * 2**30), int(15.75 * 2**30)),
    (LISTED.format("vmem", "scoped 20.50G"), "VMEM", int(20.5 * 2**30), int(15.75 * 2**30)),
    (LISTED.format("vmem", "x").replace("HLO temp", "scoped"), "scoped VMEM", int(20.5 * 2**30), int(15.75 * 2**30)),
    ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.57G) exceeds "
     "available HBM (15.75G).", "HBM", round(17.57 * 2**30), int(15.75 * 2**30)),
    ("RESOURCE_EXHAUSTED: Allocation (size=2147483648) would exceed memory (size=134217728) :: #allocation2 [shape = "
     "'u8[2147483648]{0}', space=vmem, size = 0x80000000, scoped, tag = 'input window allocation'] :: name.1",
     "scoped VMEM", 2**31, 2**27),
    ("RESOURCE_EXHAUSTED: something new", "", None, None)])
def test_the_words_of_the_compiler(text, memory, needed, limit):
    found = overflow.understood(text)
    assert (found.memory, found.needed, found.limit) == (memory, needed, limit)
    assert found.problem.startswith(f"it needs {needed / 2**30:,.2f} GiB of {memory}" if memory else "something new")


def test_what_takes_most_of_it_is_named():
    assert overflow.understood(LISTED.format("hbm", "x")).largest == (
        ("jit(step)/model.layers.3.mlp/dot_general", 16 * 2**30), ("something else", 4 * 2**30))


def advice(needed, name="v5e-1", wide=False, **held):
    found = overflow.hbm(round(needed * 2**30), topology.GENERATIONS["v5e"].hbm)
    parts = {key.replace("_", " "): round(value * 2**30) for key, value in held.items()}
    return "; ".join(fitting.advice(parts, found, topology.parse(name), wide))


def test_advice():
    assert advice(20, weights=18) == ("4 chips (v5e-4, tp=4: about 5.00 GiB each); a chip with more HBM (v4, v5p, v6e, "
                                      "v7x); weights of 8 bits (9.00 GiB less)")
    assert "bfloat16 instead of float32 weights (9.00 GiB less)" in advice(20, wide=True, weights=18)
    assert "50 % of the keys and values" in advice(20, weights=10, keys_and_values=8.5)
    assert "75 % of the temporaries (17.00 GiB): a smaller batch" in advice(20, weights=3)
    assert "8 chips (v5e-8, fsdp=8: about 12.50 GiB each)" in advice(25, "v5e-4", weights=6, optimizer_state=16)
    assert advice(5000, weights=5000) == "more chips, along several axes (tp=, fsdp=), and a smaller model or batch"
