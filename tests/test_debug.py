"""torch.tpu.debug: debug mode, and the origin of NaN and Inf; errors in backward()."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from processes import python
from torch_tpu.eager import bookkeeping

debug = torch.tpu.debug


@pytest.fixture(autouse=True)
def integers_on_the_device():
    before = bookkeeping.set(False)
    yield
    bookkeeping.set(before)


def out_of_range() -> torch.Tensor:
    return F.embedding(torch.tensor([0, 9], device="tpu"), torch.ones(4, 3, device="tpu"))


def test_the_mode_is_a_switch():
    assert not debug.is_on()
    out_of_range()
    with debug.mode():
        assert debug.is_on()
        with pytest.raises(IndexError, match=r"index out of range.*9.*aten\.embedding.*\(4, 3\)"):
            out_of_range()
        with debug.mode(False):
            out_of_range()
    assert not debug.is_on() and debug.set_mode(True) is False and debug.set_mode(False) is True


def test_short_ways_do_not_hide_from_it():
    x, zero = torch.ones(3, device="tpu", dtype=torch.int32), torch.zeros(3, device="tpu", dtype=torch.int32)
    for _ in range(3):
        x // zero  # defined, and unchecked
    with debug.mode(), pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x // zero


def test_the_variable():
    done = python("""
        import torch
        assert torch.tpu.debug.is_on()
        try:
            torch.multinomial(torch.tensor([-1.0, 2], device="tpu"), 1)
        except RuntimeError as error:
            print(error)
    """, TORCH_TPU_DEBUG="1")
    assert "element < 0" in done.stdout, done.stdout + done.stderr


def test_what_is_right_stays_right_in_debug_mode():
    with debug.mode():
        w = torch.randn(4, 3)
        on = w.to("tpu")
        good = torch.tensor([0, 3], device="tpu")
        assert torch.equal(F.embedding(good, on).cpu(), w[[0, 3]])
        ignored = torch.tensor([1, -100], device="tpu")
        assert F.nll_loss(on[:2], ignored).isfinite().item()
        assert torch.equal(on.take(torch.tensor([-1, 0], device="tpu")).cpu(), w.take(torch.tensor([-1, 0])))
        leaf = on.clone().requires_grad_()
        F.dropout(leaf.relu() @ leaf.t(), 0.5).sum().backward()
        assert leaf.grad.shape == (4, 3)


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x - 10)


class ZeroByZero(nn.Module):
    def forward(self, x):
        zero = x - x
        return zero / zero


class Root(nn.Module):
    """Its backward pass divides by zero, and inf - inf is NaN."""

    def forward(self, x):
        return (x - x).sqrt()


class Overflow(nn.Module):
    def forward(self, x):
        return x.abs().add(1).mul(60000).mul(60000).softmax(-1)


def model(fault: nn.Module, device: str = "tpu") -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), fault)
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"block": inner})["block"], nn.Linear(4, 2)).to(device)


@pytest.mark.parametrize("device", ["tpu", "cpu"])
@pytest.mark.parametrize("fault, operator, direction", [
    (Log(), "aten.log.default", "forward"), (ZeroByZero(), "aten.div.Tensor", "forward"),
    (Root(), "aten.add.Tensor", "backward")], ids=["log", "zero-by-zero", "root"])
def test_nan_trace_names_the_module(fault, operator, direction, device):
    net = model(fault, device)
    with pytest.raises(debug.NonFiniteError) as caught, debug.nan_trace(net):
        net(torch.ones(3, 4, device=device)).sum().backward()
    found = caught.value.finding
    assert (found.kind, found.operator, found.direction) == ("NaN", operator, direction)
    assert found.module == "1.1" and found.module_class == type(fault).__name__ and "test_debug.py:" in found.line
    assert any("float32 [3, 4]" in line for line in found.inputs) and "12 of 12 NaN" in found.outputs[0]
    if direction == "backward":
        assert found.differentiated == "aten.sub.Tensor"
        assert found.cause.operator == "aten.div.Tensor" and found.cause.differentiated == "aten.sqrt.default"
    assert "1.1" in str(caught.value) and found.operator in str(caught.value)


def test_nan_trace_says_which_overflow_was_behind_it():
    net = model(Overflow()).half()
    x = torch.ones(3, 4, device="tpu", dtype=torch.float16)
    with pytest.raises(debug.NonFiniteError) as caught, debug.nan_trace(net):
        net(x)
    assert caught.value.finding.operator == "aten._softmax.default"
    assert caught.value.finding.cause.operator == "aten.mul.Tensor" and caught.value.finding.cause.module == "1.1"
    with pytest.raises(debug.NonFiniteError, match="the first Inf") as caught, debug.nan_trace(net, inf=True):
        net(x)
    assert "input  other: 60000" in str(caught.value)


def test_nan_trace_says_when_nan_comes_from_outside():
    net = model(nn.ReLU())
    x = torch.full((3, 4), float("nan"), device="tpu")
    with pytest.raises(debug.NonFiniteError, match="already in an input"), debug.nan_trace(net):
        net(x)
    with torch.no_grad():
        net[2].weight[0, 0] = float("nan")
    with pytest.raises(debug.NonFiniteError, match=r"parameter or buffer '2\.weight'"), debug.nan_trace(net):
        net(torch.ones(3, 4, device="tpu"))


def test_nan_trace_lets_good_models_and_masks_pass():
    net = model(nn.ReLU())
    x = torch.ones(3, 4, device="tpu")
    with debug.nan_trace(net, inf=True) as trace:
        scores = net(x).masked_fill(torch.tensor([True, False], device="tpu"), float("-inf"))
        scores.softmax(-1).sum().backward()
    assert trace.first_inf is None and not net[0]._forward_hooks and net[0].weight.grad is not None


def test_nan_trace_without_a_model_and_in_place():
    x = -torch.ones(3, device="tpu")
    with pytest.raises(debug.NonFiniteError) as caught, debug.nan_trace():
        x.log_()
    assert caught.value.finding.module is None and caught.value.finding.inputs[0].endswith("-1 to -1, mean -1")


def test_nan_trace_sees_into_compiled_models():
    net = model(Log())
    compiled = torch.compile(net)
    x = torch.ones(3, 4, device="tpu")
    assert compiled(x).isnan().all()
    with pytest.raises(debug.NonFiniteError) as caught, debug.nan_trace(net):
        compiled(x)
    assert caught.value.finding.module == "1.1"


def test_detect_anomaly():
    x = torch.zeros(3, device="tpu", requires_grad=True)
    with pytest.warns(UserWarning, match=r"(?s)Anomaly Detection|Error detected in SqrtBackward0.*test_debug"), \
            torch.autograd.detect_anomaly(), \
            pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values in its 0th output"):
        (x.sqrt() * 0).sum().backward()


# PyTorch 2.13 ends the process, or loses the exception, for these on a Python device.

def test_errors_of_hooks_in_backward():
    x = torch.ones(3, device="tpu", requires_grad=True)
    for _ in range(3):
        y = x * 2
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
    z = torch.ones(3, device="tpu", requires_grad=True)
    z.register_post_accumulate_grad_hook(lambda leaf: leaf.no_such_thing)
    with pytest.raises(AttributeError, match="no_such_thing"):
        z.sum().backward()
    with pytest.raises(KeyError):
        y = x * 2
        y.grad_fn.register_hook(lambda *_: {}["lost"])
        torch.autograd.grad(y.sum(), x)
    x.grad = None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


def test_errors_of_operators_in_backward():
    done = python("""
        import torch
        x = torch.ones(1 << 22, device="tpu", requires_grad=True)
        for _ in range(2):
            y = x.sum()
            other = torch.ones(6 << 20, device="tpu")
            try:
                y.backward(torch.tensor(2.0, device="tpu"))
                (x.grad + 1).sum().item()
            except torch.OutOfMemoryError as error:
                print("out of memory")
            x.grad = None
            del other
        print((x + 1).sum().item() > 0)
    """, TORCH_TPU_VIRTUAL_HBM="52M")
    assert done.stdout.splitlines() == ["out of memory"] * 2 + ["True"], done.stdout + done.stderr[-2000:]
