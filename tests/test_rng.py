"""Generators and their state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint


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


def test_a_cpu_generator_serves():
    assert draw(torch.Generator().manual_seed(4)) == draw(torch.Generator().manual_seed(4))
    assert draw(torch.Generator().manual_seed(4)) == draw(torch.Generator("tpu").manual_seed(4))


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
