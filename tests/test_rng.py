"""Generators and their state."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn
from torch.utils.checkpoint import checkpoint

from processes import python


def draw(generator: torch.Generator | None = None) -> list[float]:
    return torch.rand(5, device="tpu", generator=generator).tolist()


def test_a_generator_of_the_device():
    generator = torch.Generator(device="tpu")
    assert generator.device == torch.device("tpu", 0) and isinstance(generator, torch.Generator)
    assert generator.manual_seed(5) is generator and generator.initial_seed() == 5
    first, state = draw(generator), generator.get_state()
    second = draw(generator)
    assert first != second
    generator.set_state(state)
    assert draw(generator) == second
    assert draw(torch.Generator("tpu").manual_seed(5)) == first
    assert isinstance(generator.seed(), int)


def test_copies_of_a_generator():
    generator = torch.Generator(device="tpu").manual_seed(8)
    draw(generator)
    for twin in (generator.clone_state(), copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
        assert twin.device.type == "tpu" and draw(twin) == draw(generator.clone_state())


def test_generators_of_other_devices_stay_pytorchs_own():
    for generator in (torch.Generator(), torch.Generator("cpu"), torch.Generator(device="cpu")):
        assert type(generator) is torch._C.Generator and isinstance(generator, torch.Generator)
        assert generator.device.type == "cpu"
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert issubclass(torch._C.Generator, torch.Generator)
    again = pickle.loads(pickle.dumps(torch.Generator().manual_seed(3)))
    assert torch.rand(2, generator=again).tolist() == torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
    with pytest.raises(RuntimeError):
        torch.Generator("nonsense")
    with pytest.raises(RuntimeError, match="one process drives one chip"):
        torch.Generator("tpu:1")


@pytest.mark.parametrize("call", [
    lambda g: torch.rand(2, device="tpu", generator=g), lambda g: torch.empty(2, device="tpu").normal_(generator=g),
    lambda g: torch.randperm(4, device="tpu", generator=g), lambda g: torch.randint(4, (2,), device="tpu", generator=g),
    lambda g: torch.multinomial(torch.ones(3, device="tpu"), 1, generator=g),
    lambda g: torch.bernoulli(torch.ones(3, device="tpu"), generator=g)])
def test_a_generator_of_another_device_is_refused(call):
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator but found 'cpu'"):
        call(torch.Generator())
    first = call(torch.Generator("tpu").manual_seed(4)).tolist()
    assert call(torch.Generator("tpu").manual_seed(4)).tolist() == first
    call(torch.tpu.default_generators[0])
    call(torch.Generator("tpu").clone_state())


def test_manual_seed():
    torch.manual_seed(1)
    one = draw()
    torch.manual_seed(1)
    assert draw() == one
    torch.tpu.manual_seed(1)
    assert draw() == one
    torch.tpu.manual_seed_all(2)
    assert torch.tpu.initial_seed() == 2 and draw() != one
    assert torch.tpu.default_generators[0].initial_seed() == 2 and len(torch.tpu.default_generators) == 1


def test_a_seed_leaves_the_cpu_stream_alone():
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    draw()
    assert torch.equal(torch.rand(3), want)


def test_state():
    state, states = torch.tpu.get_rng_state(), torch.tpu.get_rng_state_all()
    assert state.dtype == torch.uint8 and torch.equal(state, states[0])
    one = draw()
    torch.tpu.set_rng_state(state)
    assert draw() == one
    torch.tpu.set_rng_state_all(states)
    assert draw() == one


@pytest.mark.parametrize("options", [{}, {"device_type": "tpu"}, {"devices": [0], "device_type": "tpu"}])
def test_fork_rng(options):
    torch.manual_seed(3)
    with torch.random.fork_rng(**options):
        inside = draw()
    assert draw() == inside


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_replays_the_numbers(reentrant):
    weight = torch.ones(64, device="tpu", requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True) * x

    result = checkpoint(layer, weight, use_reentrant=reentrant)
    result.sum().backward()
    # d(m x x)/dx = 2 m x, with the mask m of the forward pass
    assert torch.equal(weight.grad.cpu(), 2 * result.detach().cpu())


def test_dataloaders_take_cpu_generators():
    from torch.utils.data import DataLoader, TensorDataset, random_split

    data = TensorDataset(torch.arange(8))
    order = [batch[0].tolist() for batch in DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(1))]
    assert sorted(n for batch in order for n in batch) == list(range(8))
    assert [len(part) for part in random_split(data, [5, 3], torch.Generator().manual_seed(1))] == [5, 3]


def test_generators_in_traced_code():
    def f(x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        generator.manual_seed(1)
        return x + torch.rand(2, generator=generator)

    assert torch.equal(torch.compile(f, backend="eager")(torch.ones(2)), f(torch.ones(2)))


def test_seeds_reproduce_across_processes():
    code = """
        import torch
        torch.manual_seed(11)
        print(torch.rand(3, device="tpu").tolist(), torch.randn(3, device="tpu").tolist(),
              torch.randperm(6, device="tpu").tolist(), torch.multinomial(torch.ones(9, device="tpu"), 4).tolist(),
              torch.compile(lambda x: torch.nn.functional.dropout(x))(torch.ones(8, device="tpu")).tolist())
    """
    first, second = python(code), python(code)
    assert first.returncode == 0 and first.stdout == second.stdout, first.stderr
    torch.manual_seed(11)
    assert first.stdout.startswith(str(torch.rand(3, device="tpu").tolist()))


# -- the same numbers from eager and compiled code --

def layers(*made: nn.Module) -> list[nn.Module]:
    return [module.to("tpu") for module in made]


def a() -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 64, device="tpu")


DRAWING = {
    "rand": lambda x: torch.rand(5, device=x.device), "rand_like": torch.rand_like, "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(0, 99, (9,), device=x.device), "normal": lambda x: torch.normal(x, 1.0),
    "randperm": lambda x: torch.randperm(9, device=x.device), "bernoulli": torch.bernoulli,
    "uniform_": lambda x: torch.empty_like(x).uniform_(1, 2), "normal_": lambda x: x.clone().normal_(1, 2),
    "exponential_": lambda x: x.clone().exponential_(), "geometric_": lambda x: x.clone().geometric_(0.3),
    "multinomial": lambda x: torch.multinomial(x, 5), "poisson": lambda x: torch.poisson(x * 9),
    "dropout": lambda x: F.dropout(x), "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(-x, training=True), "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=0),
    "several": lambda x: F.dropout(x) + torch.rand_like(x) * torch.randn_like(x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 8, 8)] * 3, dropout_p=0.5),
}


def twice(f, x):
    """f's result after the same seed in eager and in compiled code, and what is drawn next."""
    results = []
    compiled = torch.compile(f)
    compiled(x)
    for run in (f, compiled):
        torch.manual_seed(5)
        results.append((run(x).detach().cpu(), torch.rand(1, device="tpu").item()))
    return results


@pytest.mark.parametrize("name", DRAWING)
def test_eager_and_compiled_code_draw_the_same(name):
    (eager, next_eager), (compiled, next_compiled) = twice(DRAWING[name], a())
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert next_compiled == next_eager


def test_eager_and_compiled_models_drop_the_same():
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    model, = layers(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), block))
    (eager, next_eager), (compiled, next_compiled) = twice(lambda x: model(x.reshape(1, 8, 8)), a())
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
    assert next_compiled == next_eager
    grads = []
    for run in (model, torch.compile(model)):
        model.zero_grad()
        torch.manual_seed(5)
        run(a().reshape(1, 8, 8)).square().sum().backward()
        grads.append(model[0].weight.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-3)


def test_checkpointed_models_drop_the_same():
    model, = layers(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))

    def loss(x: torch.Tensor, through: bool) -> torch.Tensor:
        return (checkpoint(model, x, use_reentrant=False) if through else model(x)).square().sum()

    grads = []
    for run in (lambda x: loss(x, False), lambda x: loss(x, True)):
        model.zero_grad()
        torch.manual_seed(2)
        run(a().reshape(8, 8)).backward()
        grads.append(model[0].weight.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0])


# -- distributed as they say: Kolmogorov and Smirnov's distance, or moments; seeds are fixed --

N = 20_000


def distance(sample: torch.Tensor, cdf) -> float:
    """The greatest distance of the sample's distribution from the exact one; 1.95 / sqrt(n) is passed once in 1,000."""
    x = sample.flatten().cpu().double().sort().values
    exact = cdf(x)
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return max(float((steps[1:] - exact).max()), float((exact - steps[:-1]).max())) * math.sqrt(n)


def empty() -> torch.Tensor:
    return torch.empty(N, device="tpu")


CONTINUOUS = {
    "uniform_": (lambda: empty().uniform_(-1, 3), D.Uniform(-1.0, 3.0).cdf),
    "rand": (lambda: torch.rand(N, device="tpu"), D.Uniform(0.0, 1.0).cdf),
    "normal_": (lambda: empty().normal_(2, 3), D.Normal(2.0, 3.0).cdf),
    "randn": (lambda: torch.randn(N, device="tpu"), D.Normal(0.0, 1.0).cdf),
    "exponential_": (lambda: empty().exponential_(2), D.Exponential(2.0).cdf),
    "cauchy_": (lambda: empty().cauchy_(1, 2), D.Cauchy(1.0, 2.0).cdf),
    "log_normal_": (lambda: empty().log_normal_(0.5, 0.7), D.LogNormal(0.5, 0.7).cdf),
    "gamma": (lambda: D.Gamma(torch.tensor(2.5, device="tpu"), torch.tensor(1.5, device="tpu")).sample((N,)),
              D.Gamma(torch.tensor(2.5).double(), torch.tensor(1.5).double()).cdf),
    "small gamma": (lambda: D.Gamma(torch.tensor(0.3, device="tpu"), torch.tensor(1.0, device="tpu")).sample((N,)),
                    D.Gamma(torch.tensor(0.3).double(), torch.tensor(1.0).double()).cdf),
    "chi2": (lambda: D.Chi2(torch.tensor(3.0, device="tpu")).sample((N,)), D.Chi2(torch.tensor(3.0).double()).cdf),
    "laplace": (lambda: D.Laplace(torch.tensor(0.0, device="tpu"), 2.0).sample((N,)), D.Laplace(0.0, 2.0).cdf),
    "gumbel": (lambda: D.Gumbel(torch.tensor(0.0, device="tpu"), 2.0).sample((N,)), D.Gumbel(0.0, 2.0).cdf),
    "beta(2, 1)": (lambda: D.Beta(torch.tensor(2.0, device="tpu"), torch.tensor(1.0, device="tpu")).sample((N,)),
                   lambda x: x**2),
    "dirichlet(1, 1)": (lambda: D.Dirichlet(torch.ones(2, device="tpu")).sample((N,))[:, 0], lambda x: x),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_samplers(name, no_fallback):
    sample, cdf = CONTINUOUS[name]
    torch.manual_seed(0)
    assert distance(sample(), cdf) < 1.95


def frequencies(sample: torch.Tensor, chances: torch.Tensor) -> float:
    """Pearson's statistic over its degrees of freedom's 0.999 quantile (by Wilson and Hilferty)."""
    chances = chances.double() / chances.sum()
    count = torch.bincount(sample.flatten().cpu().long(), minlength=chances.numel())[:chances.numel()].double()
    expected = chances * sample.numel()
    kept = expected >= 5
    statistic = float(((count - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    return statistic / (freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3)


def table(distribution: D.Distribution, size: int) -> torch.Tensor:
    return distribution.log_prob(torch.arange(size).double()).exp()


WEIGHTS = torch.tensor([1.0, 0.0, 3.0, 6.0])
DISCRETE = {
    "bernoulli": (lambda: torch.full((N,), 0.3, device="tpu").bernoulli(), torch.tensor([0.7, 0.3])),
    "bernoulli_": (lambda: empty().bernoulli_(0.8), torch.tensor([0.2, 0.8])),
    "poisson": (lambda: torch.poisson(empty().fill_(4)), table(D.Poisson(torch.tensor(4.0).double()), 20)),
    "large poisson": (lambda: torch.poisson(empty().fill_(60)), table(D.Poisson(torch.tensor(60.0).double()), 120)),
    "geometric_": (lambda: empty().geometric_(0.3) - 1, table(D.Geometric(torch.tensor(0.3).double()), 40)),
    "binomial": (lambda: D.Binomial(12, torch.tensor(0.4, device="tpu")).sample((N,)),
                 table(D.Binomial(12, torch.tensor(0.4).double(), validate_args=False), 13)),
    "large binomial": (lambda: D.Binomial(80, torch.tensor(0.4, device="tpu")).sample((N,)),
                       table(D.Binomial(80, torch.tensor(0.4).double(), validate_args=False), 81)),
    "randint": (lambda: torch.randint(0, 7, (N,), device="tpu"), torch.ones(7)),
    "random_": (lambda: torch.empty(N, dtype=torch.int64, device="tpu").random_(5), torch.ones(5)),
    "with replacement": (lambda: torch.multinomial(WEIGHTS.to("tpu"), N, replacement=True), WEIGHTS),
    "one of each row": (lambda: torch.multinomial(WEIGHTS.to("tpu").expand(N, 4), 1), WEIGHTS),
    "categorical": (lambda: D.Categorical(probs=WEIGHTS.to("tpu")).sample((N,)), WEIGHTS),
    "dropout": (lambda: F.dropout(torch.ones(N, device="tpu"), 0.3) == 0, torch.tensor([0.7, 0.3])),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_samplers(name, no_fallback):
    sample, chances = DISCRETE[name]
    torch.manual_seed(0)
    assert frequencies(sample(), chances) < 1


def test_multinomial_without_replacement():
    """Pairs: the second is drawn from what the first left."""
    torch.manual_seed(0)
    pairs = torch.multinomial(WEIGHTS.to("tpu").expand(N, 4), 2).cpu()
    assert (pairs[:, 0] != pairs[:, 1]).all() and not (pairs == 1).any()
    p = (WEIGHTS / WEIGHTS.sum()).double()
    chances = p[:, None] * p[None] / (1 - p[:, None])
    chances.fill_diagonal_(0)
    assert frequencies(pairs[:, 0] * 4 + pairs[:, 1], chances.flatten()) < 1


def test_permutations_are_equally_likely():
    torch.manual_seed(0)
    seen = torch.stack([torch.randperm(4, device="tpu") for _ in range(2400)]).cpu()
    code = (seen * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_inverse=True)
    assert code[0].numel() == 24 and frequencies(code[1], torch.ones(24)) < 1


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="tpu")


DISTRIBUTIONS = {
    "Bernoulli": lambda: D.Bernoulli(t(0.3)), "Beta": lambda: D.Beta(t(2.0), t(3.0)),
    "Binomial": lambda: D.Binomial(9, t(0.3)), "Categorical": lambda: D.Categorical(t(0.3, 0.7)),
    "Cauchy": lambda: D.Cauchy(t(0.0), t(1.0)), "Chi2": lambda: D.Chi2(t(3.0)),
    "ContinuousBernoulli": lambda: D.ContinuousBernoulli(t(0.3)), "Dirichlet": lambda: D.Dirichlet(t(1.0, 2.0)),
    "Exponential": lambda: D.Exponential(t(2.0)), "FisherSnedecor": lambda: D.FisherSnedecor(t(4.0), t(9.0)),
    "Gamma": lambda: D.Gamma(t(2.0), t(3.0)), "Geometric": lambda: D.Geometric(t(0.4)),
    "Gumbel": lambda: D.Gumbel(t(0.0), t(1.0)), "HalfCauchy": lambda: D.HalfCauchy(t(1.0)),
    "HalfNormal": lambda: D.HalfNormal(t(1.0)), "InverseGamma": lambda: D.InverseGamma(t(5.0), t(2.0)),
    "Kumaraswamy": lambda: D.Kumaraswamy(t(2.0), t(3.0)), "Laplace": lambda: D.Laplace(t(0.0), t(1.0)),
    "LKJCholesky": lambda: D.LKJCholesky(3, t(1.5)), "LogNormal": lambda: D.LogNormal(t(0.0), t(0.5)),
    "LogisticNormal": lambda: D.LogisticNormal(t(0.0, 1.0), t(0.5, 0.5)),
    "LowRankMultivariateNormal": lambda: D.LowRankMultivariateNormal(t(0.0, 1.0), t(1.0, 0.5)[:, None], t(1.0, 1.0)),
    "MixtureSameFamily": lambda: D.MixtureSameFamily(D.Categorical(t(0.3, 0.7)), D.Normal(t(0.0, 4.0), t(1.0, 1.0))),
    "Multinomial": lambda: D.Multinomial(9, t(0.3, 0.7)),
    "MultivariateNormal": lambda: D.MultivariateNormal(t(0.0, 1.0), torch.eye(2, device="tpu")),
    "NegativeBinomial": lambda: D.NegativeBinomial(t(5.0), t(0.3)), "Normal": lambda: D.Normal(t(0.0), t(1.0)),
    "OneHotCategorical": lambda: D.OneHotCategorical(t(0.3, 0.7)), "Pareto": lambda: D.Pareto(t(1.0), t(9.0)),
    "Poisson": lambda: D.Poisson(t(3.0)), "RelaxedBernoulli": lambda: D.RelaxedBernoulli(t(0.5), t(0.3)),
    "RelaxedOneHotCategorical": lambda: D.RelaxedOneHotCategorical(t(0.5), t(0.3, 0.7)),
    "StudentT": lambda: D.StudentT(t(9.0)), "Uniform": lambda: D.Uniform(t(0.0), t(1.0)),
    "VonMises": lambda: D.VonMises(t(0.0), t(2.0)), "Weibull": lambda: D.Weibull(t(1.0), t(2.0)),
    "Wishart": lambda: D.Wishart(t(5.0)[0], torch.eye(2, device="tpu")),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.filterwarnings("ignore:Singular sample")
def test_torch_distributions(name, no_fallback):
    torch.manual_seed(1)
    distribution = DISTRIBUTIONS[name]()
    sample = distribution.sample((4000,))
    assert sample.device.type == "tpu" and sample.shape == (4000, *distribution.batch_shape, *distribution.event_shape)
    assert distribution.log_prob(sample).isfinite().all() and distribution.support.check(sample).all()
    torch.manual_seed(1)
    assert torch.equal(DISTRIBUTIONS[name]().sample((4000,)), sample)
    try:
        mean, spread = distribution.mean.cpu(), distribution.variance.cpu().sqrt()
    except NotImplementedError:
        return
    sure = mean.isfinite() & spread.isfinite()
    error = (sample.cpu().double().mean(0) - mean).abs()
    assert (error < 5 * spread / math.sqrt(4000) + 1e-3)[sure].all(), (error, mean, spread)
