"""Transformers' Trainer (tried on 5.24.0): its checkpoints keep the device's random state, so that a resumed training
draws the same dropout."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import on_import

KEY = "tpu"  # as theirs for other devices: "cuda", "npu"


def install() -> None:
    on_import.after("transformers.trainer", _random_states)


def _random_states(module: ModuleType) -> None:
    trainer = module.Trainer
    save, load = trainer._save_rng_state, trainer._load_rng_state

    def file(self: Any, folder: str) -> Path:
        several = self.args.world_size > 1
        return Path(folder) / (f"rng_state_{self.args.process_index}.pth" if several else "rng_state.pth")

    def states(path: Path) -> Any:
        with module.safe_globals():
            return torch.load(path, weights_only=True)

    @functools.wraps(save)
    def _save_rng_state(self: Any, output_dir: str) -> None:
        save(self, output_dir)
        if self.args.device.type == "tpu":
            path = file(self, output_dir)
            torch.save({**states(path), KEY: torch.tpu.get_rng_state()}, path)  # type: ignore[attr-defined]

    @functools.wraps(load)
    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        if checkpoint is None or self.args.device.type != "tpu" or not file(self, checkpoint).is_file():
            return
        found = states(file(self, checkpoint)).get(KEY)
        if found is not None:  # a checkpoint made on another device has none
            torch.tpu.set_rng_state(found)  # type: ignore[attr-defined]

    trainer._save_rng_state = _save_rng_state
    trainer._load_rng_state = _load_rng_state
