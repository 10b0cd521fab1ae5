"""Products of quantized matrices against the CPU, or against the floats that the integers stand for."""

from __future__ import annotations

import warnings

import pytest
import torch

from conftest import compare

aten = torch.ops.aten
r = torch.randn
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2},
             torch.float16: {"rtol": 4e-3, "atol": 4e-3}}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# 1 and 2 rows run in blocks of the weight where its size asks for it: one block and a rest, whole blocks, long rows.
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(3, 64, 48), (1, 1024, 520), (2, 512, 4096), (1, 4096, 600),
                                                         (40, 256, 96)])
def test_weight_int8pack_mm(rows, inputs, outputs, dtype, no_fallback):
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales = (torch.rand(outputs) / 127 / inputs ** 0.5).to(dtype)
    compare(aten._weight_int8pack_mm, r(rows, inputs).to(dtype), weight, scales, **TOLERANCE[dtype])


def _int4(outputs: int, inputs: int, group: int, dtype: torch.dtype):
    """Numbers of four bits, two a byte, their scales and zeros as the operator takes them, and the floats."""
    q = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scale, zero = torch.rand(2, inputs // group, outputs).to(dtype) / inputs ** 0.5
    wide = [x.float().t().repeat_interleave(group, 1) for x in (scale, zero)]
    floats = (q.float() - 8) * wide[0] + wide[1]
    return (q[:, ::2] << 4) | q[:, 1::2], torch.stack([scale, zero], -1), floats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(3, 128, 48), (1, 1024, 520), (40, 256, 96)])
def test_weight_int4pack_mm(rows, inputs, outputs, dtype, no_fallback):
    packed, scales, floats = _int4(outputs, inputs, 32, dtype)
    x = r(rows, inputs).to(dtype)
    weight = aten._convert_weight_to_int4pack(packed.to("tpu"), 2)
    assert weight.shape == (outputs // 8, inputs // 32, 32, 1) and weight.dtype == torch.int32
    got = aten._weight_int4pack_mm(x.to("tpu"), weight, 32, scales.to("tpu"))
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu(), (x.float() @ floats.t()).to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "inputs", "outputs", "groups"), [(3, 128, 48, 2), (1, 192, 33, 3), (40, 256, 96, 1)])
def test_int4_mm(rows, inputs, outputs, groups, dtype, no_fallback):
    weight = torch.randint(-128, 128, (inputs // 2, outputs), dtype=torch.int8)
    scale = (torch.rand(groups, outputs) / inputs ** 0.5).to(dtype)
    x = r(rows, inputs).to(dtype)
    compare(torch.ops.tpu.int4_mm, x, weight, scale, **TOLERANCE[dtype])
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match="do not fit"):
            torch.ops.tpu.int4_mm(x[:, 2:].to(device), weight.to(device), scale.to(device))


def test_int4pack_of_a_wrong_shape():
    with pytest.raises(RuntimeError):
        aten._convert_weight_to_int4pack(torch.zeros(7, 16, dtype=torch.uint8, device="tpu"), 2)
    packed, scales, _ = _int4(16, 128, 32, torch.float32)
    weight = aten._convert_weight_to_int4pack(packed.to("tpu"), 2)
    with pytest.raises(RuntimeError):
        aten._weight_int4pack_mm(r(2, 64).to("tpu"), weight, 32, scales.to("tpu"))


@pytest.mark.parametrize("rows", [1, 24])
def test_int_mm_is_exact(rows, no_fallback):
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((rows, 512), (512, 40)))
    compare(torch._int_mm, a, b, rtol=0, atol=0)
    compare(lambda a, b: torch._int_mm(a, b.t()), a, b.t().contiguous(), rtol=0, atol=0)


@pytest.mark.parametrize("left", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_scaled_mm(left, scales, no_fallback):
    a, b = r(16, 64).to(left), r(32, 64).to(torch.float8_e4m3fn)
    sizes = ((), ()) if scales == "tensor" else ((16, 1), (1, 32))
    scale_a, scale_b = (torch.rand(s) + 0.5 for s in sizes)
    bias = r(32).bfloat16()
    want = (a.float() @ b.float().t() * scale_a * scale_b + bias.float()).bfloat16()
    got = torch._scaled_mm(a.to("tpu"), b.to("tpu").t(), scale_a=scale_a.to("tpu"), scale_b=scale_b.to("tpu"),
                           bias=bias.to("tpu"), out_dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu(), want, rtol=1e-2, atol=1e-2)


def test_a_product_written_as_out_dtype_stays_in_the_program():
    a, b = torch.randint(-128, 128, (20, 32), dtype=torch.int8), torch.randint(-128, 128, (32, 16), dtype=torch.int8)

    def step(a, b):
        product = torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, a, b)
        return product.float() * 0.5

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is cut into.*")
        got = torch.compile(step, backend="tpu")(a.to("tpu"), b.to("tpu"))
    assert torch.equal(got.cpu(), (a.int() @ b.int()).float() * 0.5)
