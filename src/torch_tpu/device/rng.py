"""Random number state of torch.tpu: that of one CPU generator, from which operators draw their keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..runtime import chips
from ..runtime.chips import Device
from ..tensor import generator


class _Generators(Sequence[torch.Generator]):
    """The default generator of each chip this process drives, made when asked for."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return (generator.default(),)[index]

    def __iter__(self) -> Iterator[torch.Generator]:
        yield generator.default()


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    """Seeds the device's generator (torch.manual_seed does too)."""
    generator.default().manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> int:
    """Seeds from the system's entropy; returns the seed."""
    return generator.default().seed()


seed_all = seed


def initial_seed() -> int:
    return generator.default().initial_seed()


def get_rng_state(device: Device = "tpu") -> torch.Tensor:
    """The generator's state, as a CPU tensor of bytes."""
    chips.check(device)
    return generator.default().get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "tpu") -> None:
    chips.check(device)
    generator.default().set_state(new_state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        set_rng_state(state)
