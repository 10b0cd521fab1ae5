"""torch.autocast("tpu") and its neighbours."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from processes import python

bf16, f32 = torch.bfloat16, torch.float32


@pytest.fixture
def x():
    return torch.randn(4, 4).to("tpu")


LOW = {"mm": lambda a: a @ a, "linear": lambda a: F.linear(a, a), "bmm": lambda a: torch.bmm(a[None], a[None]),
       "addmm": lambda a: torch.addmm(a, a, a), "einsum": lambda a: torch.einsum("ij,jk->ik", a, a),
       "conv1d": lambda a: F.conv1d(a[None], a[None, :, :3].transpose(0, 1)[:, :1].expand(4, 4, 3)),
       "sdpa": lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None]),
       "baddbmm": lambda a: torch.baddbmm(a[None], a[None], a[None])}
FULL = {"exp": torch.exp, "log_softmax": lambda a: F.log_softmax(a, 1), "softmax": lambda a: F.softmax(a, 1),
        "mse": lambda a: F.mse_loss(a, a * 2), "layer_norm": lambda a: F.layer_norm(a, (4,)), "sum": torch.sum,
        "cumsum": lambda a: a.cumsum(0), "pow": lambda a: a**2, "norm": lambda a: torch.linalg.vector_norm(a),
        "cross_entropy": lambda a: F.cross_entropy(a, torch.zeros(4, dtype=torch.int64, device="tpu")),
        "bce": lambda a: F.binary_cross_entropy_with_logits(a, (a > 0).to(a.dtype))}


@pytest.mark.parametrize("name", LOW)
def test_matrix_products_run_in_the_low_precision(x, name):
    with torch.autocast("tpu"):
        assert LOW[name](x).dtype == bf16
    with torch.autocast("tpu", dtype=torch.float16):
        assert LOW[name](x).dtype == torch.float16
    assert LOW[name](x).dtype == f32


@pytest.mark.parametrize("name", FULL)
def test_what_needs_range_runs_in_float32(x, name):
    with torch.autocast("tpu"):
        assert FULL[name](x.to(bf16)).dtype == f32
    want = FULL[name](x.to(bf16).float().cpu() if name != "cross_entropy" else x.to(bf16).float())
    with torch.autocast("tpu"):
        torch.testing.assert_close(FULL[name](x.to(bf16)).cpu(), want.cpu(), rtol=1e-4, atol=1e-5)


def test_mixed_operands_take_the_widest(x):
    low = x.to(bf16)
    with torch.autocast("tpu"):
        assert torch.cat([low, x]).dtype == f32 and torch.stack([low, low]).dtype == bf16
        assert torch.addcmul(x, low, low).dtype == f32
        assert (low + low).dtype == bf16 and (low + x).dtype == f32
        assert low.sum(dtype=bf16).dtype == bf16


def test_what_is_left_alone(x):
    with torch.autocast("tpu"):
        assert (x.double() @ x.double()).dtype == torch.float64
        assert (x.int() * x.int()).dtype == torch.int32
        assert (x.cpu() @ x.cpu()).dtype == f32
        with torch.autocast("tpu", enabled=False):
            assert (x @ x).dtype == f32
        assert (x @ x).dtype == bf16


def test_binary_cross_entropy_is_refused(x):
    with torch.autocast("tpu"), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(x.sigmoid(), x.sigmoid())


def test_defaults_in_every_thread(x):
    assert torch.amp.is_autocast_available("tpu") and torch.get_autocast_dtype("tpu") == bf16
    seen = []

    def run() -> None:
        with torch.autocast("tpu"):
            seen.append((x @ x).dtype)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [bf16]


def test_an_unsupported_dtype(x):
    with pytest.warns(UserWarning, match="not supported. Disabling autocast"), torch.autocast("tpu", torch.float64):
        assert (x @ x).dtype == f32


def test_entered_before_the_first_use():
    done = python("""
        import sys, torch
        with torch.autocast("tpu"):
            assert "jax" not in sys.modules
            x = torch.randn(2, 2, device="tpu")
            print((x @ x).dtype)
    """)
    assert done.stdout == "torch.bfloat16\n", done.stderr


def test_training(x):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to("tpu")
    target = torch.tensor([0, 1, 0, 1], device="tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        with torch.autocast("tpu"):
            loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.dtype == p.grad.dtype == f32 for p in model.parameters())


def test_custom_functions(x):
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="tpu", cast_inputs=torch.float32)
        def forward(ctx, a):
            ctx.save_for_backward(a)
            assert not torch.is_autocast_enabled("tpu")
            return a @ a

        @staticmethod
        @torch.amp.custom_bwd(device_type="tpu")
        def backward(ctx, grad):
            a, = ctx.saved_tensors
            return grad @ a.t() + a.t() @ grad

    leaf = x.detach().requires_grad_()
    with torch.autocast("tpu"):
        result = Product.apply(leaf)
    assert result.dtype == f32
    result.sum().backward()
    assert leaf.grad.dtype == f32


def test_grad_scaler():
    scaler = torch.amp.GradScaler("tpu", init_scale=4.0)
    weight = nn.Parameter(torch.ones(2, device="tpu"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * 2).sum()).backward()
    assert weight.grad.tolist() == [8, 8]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1, -1] and scaler.get_scale() == 4.0


def test_grad_scaler_skips_shrinks_grows_and_keeps_its_state():
    scaler = torch.amp.GradScaler("tpu", init_scale=8.0, growth_interval=2)
    weight = nn.Parameter(torch.ones(2, device="tpu"))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()

    step(float("inf"))
    assert weight.tolist() == [1, 1] and scaler.get_scale() == 4.0
    step(30.0)
    torch.testing.assert_close(weight.detach().cpu(), torch.full((2,), 1 - 0.5**0.5))
    step(30.0)
    assert scaler.get_scale() == 8.0
    other = torch.amp.GradScaler("tpu")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 8.0 and other.get_growth_interval() == 2
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.scale((weight * 2).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)


def test_float16_training_with_a_scaler():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("tpu")
    data, target = torch.randn(16, 4).to("tpu"), torch.arange(16, device="tpu") % 2
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("tpu", dtype=torch.float16):
            loss = F.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(p.isfinite().all() for p in model.parameters())
