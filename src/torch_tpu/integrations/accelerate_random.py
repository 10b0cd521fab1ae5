"""Accelerate's checkpoints (tried on 1.15.0) keep the device's random state beside the host's."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import on_import

KEY = "torch_tpu_manual_seed"  # as theirs for other devices: torch_cuda_manual_seed


def install() -> None:
    on_import.after("accelerate.checkpointing", _random_states)


def _random_states(module: ModuleType) -> None:
    save, load, name = module.save_accelerator_state, module.load_accelerator_state, module.RNG_STATE_NAME

    @functools.wraps(save)
    def save_accelerator_state(output_dir: Any, model_states: Any, optimizers: Any, schedulers: Any, dataloaders: Any,
                               process_index: int, *args: Any, **kwargs: Any) -> Any:
        written = save(output_dir, model_states, optimizers, schedulers, dataloaders, process_index, *args, **kwargs)
        file = Path(written) / f"{name}_{process_index}.pkl"
        states = module.load(file)
        states[KEY] = torch.tpu.get_rng_state_all()  # type: ignore[attr-defined]
        torch.save(states, file)
        return written

    @functools.wraps(load)
    def load_accelerator_state(input_dir: Any, models: Any, optimizers: Any, schedulers: Any, dataloaders: Any,
                               process_index: int, *args: Any, **kwargs: Any) -> Any:
        overridden = load(input_dir, models, optimizers, schedulers, dataloaders, process_index, *args, **kwargs)
        file = Path(input_dir) / f"{name}_{process_index}.pkl"
        states = module.load(file) if file.exists() else {}
        if KEY in states:  # a checkpoint made on another device has none
            torch.tpu.set_rng_state_all(states[KEY])  # type: ignore[attr-defined]
        return overridden

    module.save_accelerator_state = save_accelerator_state  # type: ignore[attr-defined]
    module.load_accelerator_state = load_accelerator_state  # type: ignore[attr-defined]
