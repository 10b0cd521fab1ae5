"""torch.tpu.set_eager_mode("fused"): the same numbers with fewer launches, whatever happens between operators."""

import copy
import gc

import pytest
import torch
from torch import nn

from torch_tpu.runtime import executable


@pytest.fixture(autouse=True)
def fused():
    before = torch.tpu.set_eager_mode("fused")
    yield
    torch.tpu.set_eager_mode(before)


def launches(fn):
    torch.tpu.synchronize()
    before = executable.STATISTICS.launches
    result = fn()
    torch.tpu.synchronize()
    return executable.STATISTICS.launches - before, result


def test_a_repeated_block_is_one_launch():
    x = torch.randn(8, 8, device="tpu")

    def block():
        y = x
        for _ in range(10):
            y = torch.relu(y @ x) * 0.5 + x
        return y

    torch.tpu.set_eager_mode("strict")
    strict, want = launches(block)
    torch.tpu.set_eager_mode("fused")
    counts = [launches(block)[0] for _ in range(3)]
    assert counts == [strict, 1, 1] and strict == 40
    torch.testing.assert_close(launches(block)[1], want)


def test_writes_and_views_in_program_order():
    def program(device):
        x = torch.arange(12.0, device=device).view(3, 4)
        y = x.t()
        before = x * 1
        x[1].add_(100)
        y[0] = -1
        kept = y.clone()
        x.mul_(2)
        x.view(-1)[::3].zero_()
        return x, y, before, kept, x.sum()

    for _ in range(3):
        for got, want in zip(program("tpu"), program("cpu")):
            torch.testing.assert_close(got.cpu(), want)


def test_what_nobody_holds_is_not_computed():
    x = torch.randn(4, device="tpu")
    for _ in range(2):
        y = x + 1
        del y
        assert launches(lambda: None)[0] == 0


def test_reading_inside_the_sequence():
    x = torch.ones(3, device="tpu")
    for i in range(4):
        y = x * (i + 1)
        assert bool((y > i).all()) and y.tolist() == [i + 1.0] * 3
        assert torch.nonzero(y + x).shape == (3, 1)
        x = y / (i + 1)
    assert repr(x) == "tensor([1., 1., 1.], device='tpu:0')"


def test_errors_are_raised_by_the_operator_itself():
    x = torch.ones(3, device="tpu")
    y = x + 1
    with pytest.raises(RuntimeError, match="broadcast"):
        y + torch.ones(4, device="tpu")
    with pytest.raises(RuntimeError):
        torch.ones(2, 3, device="tpu") @ torch.ones(2, 3, device="tpu")
    assert (y * 2).tolist() == [4.0] * 3


def test_random_numbers_are_those_of_strict_mode():
    def draw():
        torch.manual_seed(3)
        x = torch.randn(5, device="tpu")
        return torch.nn.functional.dropout(x + torch.rand(5, device="tpu"), 0.5)

    torch.tpu.set_eager_mode("strict")
    want = draw()
    torch.tpu.set_eager_mode("fused")
    for _ in range(3):
        torch.testing.assert_close(draw(), want)


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
                                  lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_training_gives_the_losses_of_the_cpu(make):
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    chip = copy.deepcopy(host).to("tpu")
    data = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(6)]

    def train(model, device):
        optimizer = make(model.parameters())
        losses = []
        for x, y in data:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    counts: list[int] = []
    want = train(host, "cpu")
    counts.append(launches(lambda: torch.testing.assert_close(train(chip, "tpu"), want, rtol=1e-4, atol=1e-5))[0])
    for a, b in zip(host.parameters(), chip.parameters()):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-4, atol=1e-5)
    assert counts[0] < 400


def test_a_compiled_graph_that_writes_what_the_batch_reads():
    x = torch.ones(4, device="tpu")

    @torch.compile(backend="tpu")
    def step(t):
        t.add_(1)
        return t * 2

    for i in range(3):
        before = x * 10
        assert step(x).tolist() == [2.0 * (i + 2)] * 4
        assert before.tolist() == [10.0 * (i + 1)] * 4 and x.tolist() == [i + 2.0] * 4


def test_memory_is_given_back():
    x = torch.randn(64, 64, device="tpu")
    torch.tpu.synchronize()
    gc.collect()
    before = torch.tpu.memory_allocated()
    for _ in range(5):
        y = x
        for _ in range(20):
            y = torch.sin(y)
        y.sum().item()
    del y
    assert torch.tpu.memory_allocated() == before


def test_an_operator_that_fails_when_it_runs_says_so_at_every_use(monkeypatch):
    from torch_tpu.eager import batch

    x = torch.ones(3, device="tpu")
    torch.tpu.synchronize()
    y = x + 1

    def fail(*_):
        raise torch.OutOfMemoryError("tpu: out of memory")

    monkeypatch.setattr(batch, "_launch", fail)
    with pytest.raises(torch.OutOfMemoryError):
        y.tolist()
    monkeypatch.undo()
    with pytest.raises(torch.OutOfMemoryError):
        (y + 1).tolist()
    assert (x + 1).tolist() == [2.0] * 3


def test_unknown_mode():
    with pytest.raises(ValueError, match=r"'strict'.*'fused'"):
        torch.tpu.set_eager_mode("lazy")
    assert torch.tpu.get_eager_mode() == "fused"
