"""Wrong calls raise on the device what they raise on the CPU: a table. `d` puts a CPU tensor where the call runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torch_tpu.eager import bookkeeping


def f32(*sizes):
    return torch.ones(sizes)


def f16(*sizes):
    return torch.ones(sizes, dtype=torch.float16)


def f64(*sizes):
    return torch.ones(sizes, dtype=torch.float64)


def i64(*sizes):
    return torch.ones(sizes, dtype=torch.int64)


def i32(*sizes):
    return torch.ones(sizes, dtype=torch.int32)


def flag(*sizes):
    return torch.ones(sizes, dtype=torch.bool)


def c64(*sizes):
    return torch.ones(sizes, dtype=torch.complex64)


def wider_out(d, name):
    """An out= tensor of float64 for float32 values."""
    x = d(f32(2, 2))
    call = {"mm": (x, x), "gather": (x, 0, d(i64(2, 2))), "topk": (x, 1), "sort": (x,), "amax": (x, 0),
            "softmax": (x, 0), "tril": (x,), "take": (x, d(i64(2)))}[name]
    result = getattr(torch, name)(*call)
    first = result if isinstance(result, torch.Tensor) else result[0]
    out = torch.empty_like(first, dtype=torch.float64)
    return getattr(torch, name)(*call, out=out if first is result else (out, torch.empty_like(result[1])))


MIXED_DTYPES = {
    "linear": lambda d: F.linear(d(f32(2, 2)), d(f16(2, 2))),
    "linear integers": lambda d: F.linear(d(i64(2, 2)), d(f32(2, 2))),
    "linear bias": lambda d: F.linear(d(f32(2, 2)), d(f32(2, 2)), d(f16(2))),
    "linear bias 3d": lambda d: F.linear(d(f32(2, 2, 2)), d(f32(2, 2)), d(f16(2))),
    "mm": lambda d: torch.mm(d(f32(2, 2)), d(f64(2, 2))),
    "matmul": lambda d: d(f32(2, 2, 2)) @ d(f16(2, 2)),
    "bmm": lambda d: torch.bmm(d(f32(2, 2, 2)), d(f16(2, 2, 2))),
    "addmm": lambda d: torch.addmm(d(f32(2, 2)), d(f32(2, 2)), d(f16(2, 2))),
    "addmm self": lambda d: torch.addmm(d(f16(2, 2)), d(f32(2, 2)), d(f32(2, 2))),
    "baddbmm": lambda d: torch.baddbmm(d(f32(2, 2, 2)), d(f32(2, 2, 2)), d(f16(2, 2, 2))),
    "addbmm": lambda d: torch.addbmm(d(f32(2, 2)), d(f32(2, 2, 2)), d(f16(2, 2, 2))),
    "mv": lambda d: torch.mv(d(f32(2, 2)), d(f16(2))),
    "addmv": lambda d: torch.addmv(d(f32(2)), d(f32(2, 2)), d(f16(2))),
    "dot": lambda d: torch.dot(d(f32(2)), d(f16(2))),
    "einsum": lambda d: torch.einsum("ij,jk->ik", d(f32(2, 2)), d(f16(2, 2))),
    "tensordot": lambda d: torch.tensordot(d(f32(2, 2)), d(f16(2, 2)), 1),
    "bilinear": lambda d: F.bilinear(d(f32(2, 2)), d(f16(2, 2)), d(f32(2, 2, 2))),
    "conv1d": lambda d: F.conv1d(d(f32(1, 1, 4)), d(f16(1, 1, 2))),
    "conv2d": lambda d: F.conv2d(d(f32(1, 1, 4, 4)), d(f16(1, 1, 2, 2))),
    "conv2d integers": lambda d: F.conv2d(d(i64(1, 1, 4, 4)), d(f32(1, 1, 2, 2))),
    "conv2d bias": lambda d: F.conv2d(d(f32(1, 1, 4, 4)), d(f32(1, 1, 2, 2)), d(f16(1))),
    "conv_transpose2d": lambda d: F.conv_transpose2d(d(f32(1, 1, 4, 4)), d(f16(1, 1, 2, 2))),
    "layer_norm": lambda d: F.layer_norm(d(f32(2, 2)), (2,), d(f16(2)), d(f16(2))),
    "prelu": lambda d: F.prelu(d(f32(2)), d(f64(1))),
    "lerp": lambda d: torch.lerp(d(f32(2)), d(f64(2)), 0.5),
    "nll_loss weight": lambda d: F.nll_loss(d(f32(2, 3)), d(i64(2)), d(f64(3))),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(d(f32(2)), d(f64(2))),
    "attention": lambda d: F.scaled_dot_product_attention(d(f32(1, 1, 2, 2)), d(f16(1, 1, 2, 2)), d(f32(1, 1, 2, 2))),
    "grid_sample": lambda d: F.grid_sample(d(f32(1, 1, 4, 4)), d(f64(1, 2, 2, 2)), align_corners=False),
    "cdist": lambda d: torch.cdist(d(f32(2, 2)), d(f64(2, 2))),
    "cross": lambda d: torch.linalg.cross(d(f32(3)), d(i64(3))),
    "solve": lambda d: torch.linalg.solve(d(f32(2, 2)), d(f64(2, 2))),
    "complex": lambda d: torch.complex(d(f32(2)), d(f64(2))),
    "polar": lambda d: torch.polar(d(f32(2)), d(f64(2))),
    "heaviside": lambda d: torch.heaviside(d(f32(2)), d(f64(2))),
    "scatter": lambda d: d(f32(2, 2)).scatter(0, d(i64(2, 2)), d(f64(2, 2))),
    "scatter_add": lambda d: d(f32(2, 2)).scatter_add(0, d(i64(2, 2)), d(f64(2, 2))),
    "index_add": lambda d: d(f32(2, 2)).index_add(0, d(i64(2)), d(f64(2, 2))),
    "index_copy": lambda d: d(f32(2, 2)).index_copy(0, d(i64(2)), d(f64(2, 2))),
    "index_put": lambda d: d(f32(4)).index_put((d(i64(2)),), d(f64(2))),
    "put": lambda d: d(f32(2, 2)).put_(d(i64(2)), d(f64(2))),
    "masked_scatter": lambda d: d(f32(2)).masked_scatter(d(flag(2)), d(f64(2))),
    "lstm": lambda d: torch.nn.LSTM(2, 2).to(d(f32(1)).device)(d(f16(1, 1, 2))),
}

INDICES = {
    "index": lambda d: d(f32(4))[d(f32(2))],
    "index int16": lambda d: d(f32(4))[d(i32(2)).to(torch.int16)],
    "index_put": lambda d: d(f32(4)).__setitem__(d(f32(2)), 0),
    "embedding": lambda d: F.embedding(d(f32(2)), d(f32(2, 2))),
    "embedding_bag": lambda d: F.embedding_bag(d(f32(2, 2)), d(f32(2, 2))),
    "gather float": lambda d: d(f32(2, 2)).gather(0, d(f32(2, 2))),
    "index_select": lambda d: d(f32(2, 2)).index_select(0, d(f32(2))),
    "index_select 2d": lambda d: d(f32(2, 2)).index_select(0, d(i64(2, 2))),
    "index_add": lambda d: d(f32(2, 2)).index_add(0, d(f32(2)), d(f32(2, 2))),
    "index_copy": lambda d: d(f32(2, 2)).index_copy(0, d(i32(2)), d(f32(2, 2))),
    "index_fill": lambda d: d(f32(2, 2)).index_fill(0, d(f32(2)), 0),
    "take": lambda d: d(f32(2, 2)).take(d(i32(2))),
    "masked_fill": lambda d: d(f32(2)).masked_fill(d(i64(2)), 0),
    "masked_select": lambda d: d(f32(2)).masked_select(d(i64(2))),
    "where": lambda d: torch.where(d(f32(2)), d(f32(2)), d(f32(2))),
    "cross_entropy int32": lambda d: F.cross_entropy(d(f32(2, 3)), d(i32(2))),
    "cross_entropy bool": lambda d: F.cross_entropy(d(f32(2, 3)), d(flag(2))),
    "nll_loss int32": lambda d: F.nll_loss(d(f32(2, 3)), d(i32(2))),
    "nll_loss 2d int32": lambda d: F.nll_loss(d(f32(2, 3, 4, 4)), d(i32(2, 4, 4))),
    "multi_margin_loss": lambda d: F.multi_margin_loss(d(f32(2, 3)), d(i32(2))),
    "one_hot": lambda d: F.one_hot(d(f32(2)), 3),
}

NO_MEANING = {
    "complex < number": lambda d: d(c64(2)) < 1, "complex < complex": lambda d: d(c64(2)) < d(c64(2)),
    "float < complex number": lambda d: d(f32(2)) < 1j, "complex max": lambda d: d(c64(2)).max(),
    "complex maximum": lambda d: torch.maximum(d(c64(2)), d(c64(2))), "complex sort": lambda d: d(c64(2)).sort(),
    "complex topk": lambda d: d(c64(2)).topk(1), "complex argmax": lambda d: d(c64(2)).argmax(),
    "complex amax": lambda d: d(c64(2)).amax(0), "complex median": lambda d: d(c64(2)).median(),
    "complex cummax": lambda d: d(c64(2)).cummax(0), "complex floor": lambda d: d(c64(2)).floor(),
    "complex sign": lambda d: d(c64(2)).sign(), "complex clamp": lambda d: d(c64(2)).clamp(0, 1),
    "complex relu": lambda d: F.relu(d(c64(2))), "complex gelu": lambda d: F.gelu(d(c64(2))),
    "complex softmax": lambda d: d(c64(2)).softmax(0), "complex erf": lambda d: torch.erf(d(c64(2))),
    "complex atan2": lambda d: torch.atan2(d(c64(2)), d(c64(2))), "complex //": lambda d: d(c64(2)) // 2,
    "complex %": lambda d: d(c64(2)) % 2, "complex mse": lambda d: F.mse_loss(d(c64(2)), d(c64(2))),
    "float &": lambda d: d(f32(2)) & d(f32(2)), "float ~": lambda d: ~d(f32(2)),
    "float gcd": lambda d: torch.gcd(d(f32(2)), d(f32(2))), "bool -": lambda d: d(flag(2)) - d(flag(2)),
    "-bool": lambda d: -d(flag(2)), "bool mm": lambda d: d(flag(2, 2)) @ d(flag(2, 2)),
    "bool ceil": lambda d: d(flag(2)).ceil(), "bool topk": lambda d: d(flag(2)).topk(1),
    "bool argmax": lambda d: d(flag(2)).argmax(), "integer mean": lambda d: d(i64(2)).mean(),
    "integer std": lambda d: d(i64(2)).std(), "integer norm": lambda d: d(i64(2)).norm(),
    "integer softmax": lambda d: d(i64(2)).softmax(0), "integer gelu": lambda d: F.gelu(d(i64(2))),
    "integer silu": lambda d: F.silu(d(i64(2))), "integer leaky_relu": lambda d: F.leaky_relu(d(i64(2))),
    "integer layer_norm": lambda d: F.layer_norm(d(i64(2, 2)), (2,)), "integer mse": lambda d: F.mse_loss(
        d(i64(2)), d(i64(2))), "integer smooth_l1": lambda d: F.smooth_l1_loss(d(i64(2)), d(i64(2))),
    "integer batch_norm": lambda d: F.batch_norm(d(i64(2, 2)), None, None, training=True),
    "integer interpolate": lambda d: F.interpolate(d(i64(1, 1, 4, 4)), scale_factor=2, mode="bilinear"),
    "integer multinomial": lambda d: torch.multinomial(d(i64(2)), 1),
    "integer bernoulli": lambda d: torch.bernoulli(d(i64(2))), "integer normal_": lambda d: d(i64(2)).normal_(),
    "integer uniform_": lambda d: d(i64(2)).uniform_(), "integer sqrt_": lambda d: d(i64(2)).sqrt_(),
    "integer div_": lambda d: d(i64(2)).div_(2), "integer add_": lambda d: d(i64(2)).add_(1.5),
    "real add_ complex": lambda d: d(f32(2)).add_(1j), "integer inv": lambda d: torch.linalg.inv(d(i64(2, 2))),
    "alpha": lambda d: torch.add(d(i64(2)), d(i64(2)), alpha=1.5),
    "integer requires_grad": lambda d: d(i64(2)).requires_grad_(), "rfft": lambda d: torch.fft.rfft(d(c64(4))),
    "randn": lambda d: torch.randn(2, dtype=torch.int64, device=d(f32(1)).device),
    "full": lambda d: torch.full((2,), 1j, dtype=torch.float32, device=d(f32(1)).device),
}

SIZES = {
    "add": lambda d: d(f32(2, 3)) + d(f32(2, 4)), "add_": lambda d: d(f32(2)).add_(d(f32(2, 2))),
    "mm": lambda d: d(f32(2, 3)) @ d(f32(2, 3)), "cat": lambda d: torch.cat([d(f32(2, 2)), d(f32(3, 3))]),
    "stack": lambda d: torch.stack([d(f32(2)), d(f32(3))]), "sum": lambda d: d(f32(2)).sum(3),
    "sum twice": lambda d: d(f32(2, 2)).sum((0, 0)), "softmax": lambda d: d(f32(2)).softmax(2),
    "sort": lambda d: d(f32(4)).sort(3), "argsort": lambda d: d(f32(4)).argsort(3), "topk": lambda d: d(f32(2)).topk(3),
    "view": lambda d: d(f32(2, 3)).view(4), "expand": lambda d: d(f32(2, 3)).expand(4, 3),
    "gather": lambda d: d(f32(2, 2)).gather(0, d(i64(2, 3))), "index": lambda d: d(f32(4, 4))[d(i64(2)), d(i64(3))],
    "too many indices": lambda d: d(f32(4))[d(i64(2)), d(i64(2))], "mask": lambda d: d(f32(4))[d(flag(3))],
    "index_copy": lambda d: d(f32(2, 2)).index_copy(0, d(i64(2)), d(f32(3, 2))),
    "cross_entropy": lambda d: F.cross_entropy(d(f32(2, 3)), d(i64(3))),
    "nll_loss": lambda d: F.nll_loss(d(f32(2, 3)), d(i64(2, 3))),
    "nll_loss weight": lambda d: F.nll_loss(d(f32(2, 3)), d(i64(2)), d(f32(4))),
    "conv2d channels": lambda d: F.conv2d(d(f32(1, 2, 4, 4)), d(f32(1, 1, 2, 2))),
    "conv2d stride": lambda d: F.conv2d(d(f32(1, 1, 4, 4)), d(f32(1, 1, 2, 2)), stride=0),
    "conv2d padding": lambda d: F.conv2d(d(f32(1, 1, 4, 4)), d(f32(1, 1, 2, 2)), padding=-1),
    "max_pool2d": lambda d: F.max_pool2d(d(f32(1, 1, 4, 4)), 2, padding=2),
    "layer_norm": lambda d: F.layer_norm(d(f32(2, 2)), (3,)), "embedding": lambda d: F.embedding(d(i64(2)), d(f32(2))),
    "multinomial": lambda d: torch.multinomial(d(f32(2)), 3), "multinomial 0": lambda d: torch.multinomial(
        d(f32(2)), 0), "copy_": lambda d: d(f32(2)).copy_(d(f32(3))), "clamp": lambda d: d(f32(2)).clamp(),
    "expanded": lambda d: d(f32(1)).expand(3).add_(1), "overlap": lambda d: (lambda x: x[1:].add_(x[:-1]))(d(f32(4))),
    "item": lambda d: d(f32(2)).item(), "bool": lambda d: bool(d(f32(2))),
    "backward": lambda d: d(f32(2)).requires_grad_().mul(2).backward(),
    "leaf": lambda d: d(f32(2)).requires_grad_().add_(1),
    "cholesky": lambda d: torch.linalg.cholesky(-d(torch.eye(2))),
    "inv": lambda d: torch.linalg.inv(d(torch.zeros(2, 2))),
    "out": lambda d: torch.add(d(f32(2)), d(f32(2)), out=d(i64(2))),
}
for _name in ("mm", "gather", "topk", "sort", "amax", "softmax", "tril", "take"):
    SIZES[f"{_name} out"] = lambda d, name=_name: wider_out(d, name)
for _name in ("max", "min", "argmax", "argmin", "amax", "aminmax", "mode"):
    SIZES[f"{_name} of nothing"] = lambda d, name=_name: getattr(torch, name)(d(torch.empty(0)))
for _name in ("max", "argmax", "amax", "aminmax", "median", "mode"):
    SIZES[f"{_name} over nothing"] = lambda d, name=_name: getattr(torch, name)(d(torch.empty(2, 0)), dim=1)

NUMBERS = {
    "// 0": lambda d: d(i64(2)) // 0, "% 0": lambda d: d(i64(2)) % 0, "// False": lambda d: d(i64(2)) // False,
    "bool // 0": lambda d: d(flag(2)) // 0, "fmod 0": lambda d: torch.fmod(d(i64(2)), 0),
    "uint8 % 0": lambda d: d(i64(2).byte()) % 0, "div 0": lambda d: torch.div(d(i64(2)), 0, rounding_mode="trunc"),
    "floor_divide_ 0": lambda d: d(i64(2)).floor_divide_(0), "** -1": lambda d: d(i64(2)) ** -1,
    "int32 ** -2": lambda d: d(i32(2)) ** -2, "pow_ -1": lambda d: d(i64(2)).pow_(-1),
    "_foreach_pow -1": lambda d: torch._foreach_pow([d(i64(2))], -1),
    "uniform_": lambda d: d(f32(2)).uniform_(1, 0), "bernoulli_": lambda d: d(f32(2)).bernoulli_(1.5),
    "random_": lambda d: d(f32(2)).random_(3, 1), "normal_": lambda d: d(f32(2)).normal_(0, -1),
    "exponential_": lambda d: d(f32(2)).exponential_(-1), "dropout": lambda d: F.dropout(d(f32(2)), 1.5),
    "quantile": lambda d: torch.quantile(d(f32(4)), 1.5), "histc": lambda d: torch.histc(d(f32(4)), 4, 3, 1),
    "repeat_interleave": lambda d: d(f32(2)).repeat_interleave(-d(i64(2))),
    "bincount": lambda d: torch.bincount(-d(i64(2))), "one_hot": lambda d: F.one_hot(-d(i64(2))),
}

# Values on the device: looked at in debug mode.
VALUES = {
    "// t": lambda d: d(i64(2)) // (d(i64(2)) - 1), "% t": lambda d: d(i64(2)) % (d(i64(2)) - 1),
    "3 // t": lambda d: 3 // (d(i64(2)) - 1), "embedding": lambda d: F.embedding(d(i64(2)) * 9, d(f32(2, 2))),
    "embedding -1": lambda d: F.embedding(-d(i64(2)), d(f32(2, 2))),
    "embedding_bag": lambda d: F.embedding_bag(d(i64(2, 2)) * 9, d(f32(2, 2))),
    "gather": lambda d: d(f32(2, 2)).gather(0, d(i64(2, 2)) * 9),
    "index_select": lambda d: d(f32(2, 2)).index_select(0, d(i64(2)) * 9),
    "index": lambda d: d(f32(2, 2))[d(i64(2)) * 9], "index_put": lambda d: d(f32(2, 2)).__setitem__(d(i64(2)) * 9, 0),
    "cross_entropy": lambda d: F.cross_entropy(d(f32(2, 2)), d(i64(2)) * 9),
    "cross_entropy 2d": lambda d: F.cross_entropy(d(f32(2, 2, 3, 3)), d(i64(2, 3, 3)) * 9),
    "scatter": lambda d: d(f32(2, 2)).scatter(0, d(i64(2, 2)) * 9, 1.0),
    "scatter_add": lambda d: d(f32(2, 2)).scatter_add(0, d(i64(2, 2)) * 9, d(f32(2, 2))),
    "scatter_reduce": lambda d: d(f32(2, 2)).scatter_reduce(0, d(i64(2, 2)) * 9, d(f32(2, 2)), "sum"),
    "index_add": lambda d: d(f32(2)).index_add(0, d(i64(2)) * 9, d(f32(2))),
    "index_copy": lambda d: d(f32(2, 2)).index_copy(0, d(i64(2)) * 9, d(f32(2, 2))),
    "index_fill": lambda d: d(f32(2, 2)).index_fill(0, d(i64(2)) * 9, 0.0),
    "take": lambda d: d(f32(2, 2)).take(d(i64(2)) * 9), "put": lambda d: d(f32(2, 2)).put(d(i64(2)) * 9, d(f32(2))),
    "multi_margin_loss": lambda d: F.multi_margin_loss(d(f32(2, 3)), d(i64(2)) * 9),
    "masked_scatter": lambda d: d(f32(4)).masked_scatter(d(flag(4)), d(f32(2))),
    "multinomial": lambda d: torch.multinomial(-d(f32(4)), 1),
    "multinomial 0": lambda d: torch.multinomial(d(f32(4)) * 0, 1),
    "bernoulli": lambda d: torch.bernoulli(d(f32(4)) * 2),
    "bernoulli_": lambda d: d(f32(4)).bernoulli_(d(f32(4)) * 2), "poisson": lambda d: torch.poisson(-d(f32(2))),
    "normal": lambda d: torch.normal(d(f32(2)), -d(f32(2))),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(d(f32(2)) * 2, d(f32(2))),
    "one_hot": lambda d: F.one_hot(d(i64(2)), 1),
}


@pytest.fixture(autouse=True)
def integers_on_the_device():
    before = bookkeeping.set(False)
    yield
    bookkeeping.set(before)


def same_error(call) -> None:
    with pytest.raises(Exception) as wanted:  # whatever the CPU raises
        call(lambda tensor: tensor)
    with pytest.raises(type(wanted.value)) as gotten:
        call(lambda tensor: tensor.to("tpu"))
    assert str(gotten.value).strip() and not isinstance(gotten.value, AssertionError)


ALWAYS = {f"{group}: {name}": call for group, calls in (
    ("mixed dtypes", MIXED_DTYPES), ("indices", INDICES), ("no meaning", NO_MEANING), ("sizes", SIZES),
    ("numbers", NUMBERS)) for name, call in calls.items()}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", ALWAYS)
def test_wrong_arguments(name):
    same_error(ALWAYS[name])


@pytest.mark.parametrize("name", VALUES)
def test_wrong_values_in_debug_mode(name):
    with torch.tpu.debug.mode():
        same_error(VALUES[name])


@pytest.mark.parametrize("name", ["embedding", "cross_entropy", "index", "gather", "take"])
def test_wrong_values_that_the_host_knows(name):
    bookkeeping.set(True)
    same_error(VALUES[name])


def test_the_second_call_is_checked_too():
    x = torch.full((3,), 2, device="tpu")
    assert (x ** 2).tolist() == [4, 4, 4] and (x // 2).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="negative integer powers"):
        x ** -1
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x // 0
    assert torch.zeros(3, device="tpu").bernoulli_(1.0).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match=r"p=1\.5"):
        torch.zeros(3, device="tpu").bernoulli_(1.5)
