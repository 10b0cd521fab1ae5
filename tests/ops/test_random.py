"""Samplers: right shapes and dtypes, reproducible from a seed, and distributed as they say."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.usefixtures("no_fallback")

N = 20_000


def draw(fn) -> torch.Tensor:
    result = fn(torch.empty(N, device="tpu"))
    assert result.device.type == "tpu"
    return result.cpu().double()


def near(value: torch.Tensor, want: float, spread: float) -> None:
    """Within five standard errors of a mean of N draws."""
    assert abs(float(value.mean()) - want) < 5 * spread / math.sqrt(N)


def test_uniform():
    x = draw(lambda t: t.uniform_(-1, 3))
    assert x.min() >= -1 and x.max() < 3
    near(x, 1.0, 4 / math.sqrt(12))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        y = torch.rand(N, dtype=dtype, device="tpu")
        assert y.dtype == dtype and float(y.max()) < 1 and float(y.min()) >= 0


def test_normal():
    x = draw(lambda t: t.normal_(2, 3))
    near(x, 2, 3)
    assert abs(float(x.std()) - 3) < 0.1
    near(torch.randn(N, device="tpu").cpu(), 0, 1)
    near(torch.normal(torch.full((N,), 1.0, device="tpu"), 0.5).cpu(), 1, 0.5)
    near(torch.normal(0.0, torch.full((N,), 2.0, device="tpu")).cpu(), 0, 2)
    z = torch.randn(N, dtype=torch.complex64, device="tpu").cpu()
    assert abs(float(z.abs().square().mean()) - 1) < 0.05


def test_other_distributions():
    near(draw(lambda t: t.exponential_(2)), 0.5, 0.5)
    near(draw(lambda t: t.geometric_(0.25)), 4, math.sqrt(0.75) / 0.25)
    near(draw(lambda t: t.log_normal_(0, 0.5)).log(), 0, 0.5)
    assert abs(float(draw(lambda t: t.cauchy_(1, 2)).median()) - 1) < 0.2
    near(draw(lambda t: torch.poisson(t.fill_(3))), 3, math.sqrt(3))
    near(draw(lambda t: torch.binomial(t.fill_(10), torch.full_like(t, 0.3))), 3, math.sqrt(2.1))
    near(draw(lambda t: torch._standard_gamma(t.fill_(2))), 2, math.sqrt(2))
    p = torch.distributions.Dirichlet(torch.ones(3, device="tpu")).sample((N,)).cpu()
    torch.testing.assert_close(p.sum(-1), torch.ones(N))


def test_reparametrised_gamma():
    a = torch.full((N,), 3.0, device="tpu", requires_grad=True)
    torch.distributions.Gamma(a, 1.0).rsample().sum().backward()
    near(a.grad.cpu(), 1.0, 1.0)  # the mean of Gamma(a, 1) is a


def test_bernoulli():
    near(draw(lambda t: t.bernoulli_(0.3)), 0.3, 0.46)
    near(draw(lambda t: torch.bernoulli(t.fill_(0.7))), 0.7, 0.46)
    p = torch.tensor([0.0, 1.0], device="tpu")
    assert torch.bernoulli(p).tolist() == [0, 1]
    near(torch.empty(N, dtype=torch.int64, device="tpu").bernoulli_(0.5).cpu().double(), 0.5, 0.5)


def test_integers():
    x = torch.randint(-3, 4, (N,), device="tpu").cpu()
    assert x.dtype == torch.int64 and x.min() == -3 and x.max() == 3
    near(x.double(), 0, 2)
    near(torch.randint_like(torch.empty(N, device="tpu"), 5).cpu().double(), 2, math.sqrt(2))
    big = torch.empty(N, dtype=torch.int64, device="tpu").random_(2**40, 2**41).cpu()
    assert big.min() >= 2**40 and big.max() < 2**41
    assert torch.empty(N, dtype=torch.uint8, device="tpu").random_().cpu().max() > 200
    assert torch.empty(N, dtype=torch.int64, device="tpu").random_(-(2**63), None).cpu().min() < 0
    assert sorted(torch.randperm(50, device="tpu").tolist()) == list(range(50))


def test_multinomial():
    weights = torch.tensor([0.0, 1.0, 3.0], device="tpu")
    drawn = torch.multinomial(weights, N, replacement=True).cpu()
    assert drawn.min() == 1
    near((drawn == 2).double(), 0.75, 0.44)
    assert sorted(torch.multinomial(weights, 2).tolist()) == [1, 2]
    once = torch.multinomial(weights.expand(N, 3), 1).cpu()
    near((once == 2).double(), 0.75, 0.44)


def test_dropout():
    x = torch.ones(N, device="tpu", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    near((y == 0).cpu().double(), 0.25, 0.44)
    kept = y[y != 0].detach().cpu()
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.75))
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert torch.equal(torch.nn.functional.dropout(x, 0.5, training=False), x)
    assert torch.nn.functional.dropout(x, 1.0).count_nonzero() == 0
    assert torch.nn.functional.dropout(x.bfloat16(), 0.5).dtype == torch.bfloat16
    torch.nn.functional.rrelu(x, training=True).sum().backward()


def test_seeds():
    def sample() -> list[torch.Tensor]:
        return [torch.rand(5, device="tpu").cpu(), torch.randn(5, device="tpu").cpu()]

    torch.manual_seed(7)
    first = sample()
    torch.manual_seed(7)
    second = sample()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(sample()[0], second[0])
    generator = torch.Generator("tpu").manual_seed(3)
    a = torch.rand(4, device="tpu", generator=generator).cpu()
    generator.manual_seed(3)
    assert torch.equal(a, torch.rand(4, device="tpu", generator=generator).cpu())
