"""Matrix products against the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

r = torch.randn


@pytest.mark.parametrize(("fn", "shapes"), [
    (torch.mm, ((3, 4), (4, 5))), (torch.bmm, ((2, 3, 4), (2, 4, 5))), (torch.mv, ((3, 4), (4,))),
    (torch.dot, ((4,), (4,))), (torch.matmul, ((2, 3, 4), (4, 5))), (torch.addmm, ((5,), (3, 4), (4, 5))),
    (torch.addmv, ((3,), (3, 4), (4,))), (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    (torch.addbmm, ((3, 5), (2, 3, 4), (2, 4, 5))), (torch.addr, ((3, 4), (3,), (4,))),
    (F.linear, ((2, 3, 4), (5, 4), (5,))), (F.bilinear, ((3, 4), (3, 5), (6, 4, 5), (6,))),
])
def test_products(fn, shapes, no_fallback):
    args = [r(s) for s in shapes]
    compare(fn, *args)
    compare_grad(fn, *args)


def test_int64_is_exact(no_fallback):
    a, b = torch.randint(-2**40, 2**40, (3, 4)), torch.randint(-9, 9, (4, 5))
    compare(torch.mm, a, b, rtol=0, atol=0)


def test_zero_beta_ignores_nan(no_fallback):
    compare(lambda s, a, b: torch.addmm(s, a, b, beta=0, alpha=0.5), torch.full((3, 5), torch.nan), r(3, 4), r(4, 5))


def test_bfloat16_rounds_once(no_fallback):
    a, b = r(8, 512).bfloat16(), r(512, 8).bfloat16()
    got = (a.to("tpu") @ b.to("tpu")).cpu()
    torch.testing.assert_close(got, (a.double() @ b.double()).bfloat16(), rtol=2**-8, atol=2**-8)


def test_bfloat16_batch_of_one_transposed(no_fallback):
    # XLA:CPU, left to itself: "Unsupported element type for DotThunk".
    compare(lambda a, b: torch.bmm(a.permute(1, 2, 0), b), r(8, 1, 3).bfloat16(), r(1, 8, 4).bfloat16(), rtol=1e-2,
            atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("left", "right"), [((16, 32), (4, 32, 24)), ((32, 16), (16, 24)), ((4, 32, 24), (24, 16))])
def test_grouped_mm(left, right, dtype, no_fallback):
    offs = torch.tensor([5, 5, 9, 24 if len(left) == 3 else 16], dtype=torch.int32)
    if len(left) == 3:
        right = (24, 24)
    a, b = r(left).to(dtype), r(right).to(dtype)
    tol = {"rtol": 3e-2, "atol": 6e-2} if dtype == torch.bfloat16 else {}

    def fn(a, b, offs):
        return F.grouped_mm(a, b, offs=offs)

    compare(fn, a, b, offs, **tol)
    if dtype == torch.float32:
        compare_grad(lambda *args: fn(*args).pow(2), a, b, offs)


def test_grouped_mm_traces_as_one_node():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda a, b, offs: F.grouped_mm(a, b, offs=offs), tracing_mode="fake")(
        r(8, 4, device="tpu"), r(2, 4, 3, device="tpu"), torch.tensor([3, 8], dtype=torch.int32, device="tpu")).graph
    assert [str(n.target) for n in graph.nodes if n.op == "call_function"] == ["tpu.grouped_mm.default"]


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, torch.inf])
def test_distances(p, no_fallback):
    compare_grad(lambda a, b: torch.cdist(a, b, p), r(2, 5, 3), r(2, 4, 3))
    compare_grad(lambda a: F.pdist(a, p), r(5, 3))
