"""Lightning, Trainer and Fabric (tried on 2.6.6, as lightning and as pytorch_lightning): its accelerator named "tpu"
is torch_xla's. Where torch_xla is not installed the name means this device, and so does "auto" where Lightning would
take the CPU.

One process drives one chip: `devices=N` starts N processes, as for CUDA, and "auto" takes all chips of the host (those
of torchrun's workers under torchrun, one in a notebook).
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

import torch

from ..runtime import chips
from . import on_import

NAME = "tpu"
_LIBRARIES = {"lightning.fabric": "lightning.pytorch", "lightning_fabric": "pytorch_lightning"}
_MIXED = ("16-mixed", "bf16-mixed")


def install() -> None:
    for fabric, trainer in _LIBRARIES.items():
        on_import.after(f"{fabric}.accelerators", functools.partial(_register, registry="ACCELERATOR_REGISTRY"))
        on_import.after(f"{trainer}.accelerators", functools.partial(_register, registry="AcceleratorRegistry"))
        on_import.after(f"{fabric}.connector",
                        functools.partial(_connect, kind="_Connector", plugin="_precision_instance",
                                          precision="_precision_input"))
        on_import.after(f"{trainer}.trainer.connectors.accelerator_connector",
                        functools.partial(_connect, kind="_AcceleratorConnector", plugin="_precision_plugin_flag",
                                          precision="_precision_flag"))
        on_import.after(f"{fabric}.strategies.ddp", functools.partial(_one_chip, method="_determine_ddp_device_ids"))
        on_import.after(f"{trainer}.strategies.ddp", functools.partial(_one_chip, method="determine_ddp_device_ids"))
        on_import.after(f"{fabric}.utilities.seed", _random_states)
        on_import.after(f"{trainer}.trainer.setup", _said)


def _ours(accelerator: Any) -> bool:
    return bool(getattr(accelerator, "is_torch_tpu", False))


def _number(devices: Any) -> int:
    """How many chips the argument `devices` asks for.

    Args:
        devices: a number, -1 for all, the first indices as a list, or either as text.

    Raises:
        ValueError: none, more than this host has, or others than the first ones.
    """
    have = max(chips.count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    given = devices
    if isinstance(given, str):
        given = [int(index) for index in given.split(",") if index.strip()] if "," in given else int(given)
    if isinstance(given, (list, tuple)):
        if sorted(given) != [*range(len(given))]:
            raise ValueError(f"devices={devices!r} picks chips, but the processes of a host take its chips in order; "
                             "give a number, and TPU_VISIBLE_CHIPS=1,2 to choose")
        given = len(given)
    number = have if given == -1 else given
    if not 1 <= number <= have:
        raise ValueError(f"devices={devices!r} asks for {number} chip(s), and this host has {have}; give a number from "
                         "1 to that, or 'auto'")
    return number


def _register(module: ModuleType, registry: str) -> None:
    """Registers the accelerator "tpu" of Fabric or of the Trainer, each of which has a base class and a registry."""
    if module.XLAAccelerator.is_available():  # torch_xla works here; it was installed on purpose
        return

    class TPUAccelerator(module.Accelerator):  # type: ignore[misc, name-defined]
        """The chip of each process, tpu:0."""

        is_torch_tpu = True

        def setup_device(self, device: torch.device) -> None:
            """Raises ValueError for a device of another kind."""
            chips.check(device)

        def teardown(self) -> None:
            torch.tpu.empty_cache()  # type: ignore[attr-defined]

        @staticmethod
        def parse_devices(devices: Any) -> int:
            return _number(devices)

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device("tpu", 0)] * devices  # each process sees its chip as tpu:0

        @staticmethod
        def auto_device_count() -> int:
            if "LOCAL_WORLD_SIZE" in os.environ:
                return int(os.environ["LOCAL_WORLD_SIZE"])
            return 1 if hasattr(sys, "ps1") else chips.count()

        @staticmethod
        def is_available() -> bool:
            return torch.tpu.is_available()  # type: ignore[attr-defined]

        @staticmethod
        def name() -> str:
            return NAME

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return torch.tpu.memory_stats(device)  # type: ignore[attr-defined]

    getattr(module, registry).register(NAME, TPUAccelerator, description="torch_tpu", override=True)


def _connect(module: ModuleType, kind: str, plugin: str, precision: str) -> None:
    """The connector turns flags into accelerator, strategy and precision; it knows its own accelerators by name."""
    connector = getattr(module, kind)
    auto, strategy = connector._choose_auto_accelerator, connector._choose_strategy
    initialized = connector._check_and_init_precision
    single = module.SingleDeviceStrategy

    @functools.wraps(auto)
    def _choose_auto_accelerator() -> str:
        found = auto()
        return NAME if found == "cpu" and torch.tpu.is_available() else found  # type: ignore[attr-defined]

    @functools.wraps(strategy)
    def _choose_strategy(self: Any) -> Any:
        if not _ours(self.accelerator):
            return strategy(self)
        if self._num_nodes_flag > 1 or len(self._parallel_devices) > 1:
            return "ddp"
        return single(device=self._parallel_devices[0])

    @functools.wraps(initialized)
    def _check_and_init_precision(self: Any) -> Any:
        chosen = getattr(self, precision)
        if _ours(self.accelerator) and getattr(self, plugin) is None and chosen in _MIXED:  # theirs is for CUDA
            setattr(self, plugin, module.MixedPrecision(chosen, NAME))
        return initialized(self)

    connector._choose_auto_accelerator = staticmethod(_choose_auto_accelerator)
    connector._choose_strategy = _choose_strategy
    connector._check_and_init_precision = _check_and_init_precision


def _one_chip(module: ModuleType, method: str) -> None:
    """DistributedDataParallel with device ids is wrapped on a stream of CUDA."""
    theirs = getattr(module.DDPStrategy, method)

    @functools.wraps(theirs)
    def device_ids(self: Any) -> Any:
        return None if self.root_device.type == "tpu" else theirs(self)

    setattr(module.DDPStrategy, method, device_ids)


def _random_states(module: ModuleType) -> None:
    """The sanity check before training must not change what the device draws afterwards."""
    collect, restore = module._collect_rng_states, module._set_rng_states

    @functools.wraps(collect)
    def _collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
        return {**collect(include_cuda), NAME: torch.tpu.get_rng_state()}  # type: ignore[attr-defined]

    @functools.wraps(restore)
    def _set_rng_states(states: dict[str, Any]) -> None:
        restore(states)
        if NAME in states:
            torch.tpu.set_rng_state(states[NAME])  # type: ignore[attr-defined]

    module._collect_rng_states = _collect_rng_states  # type: ignore[attr-defined]
    module._set_rng_states = _set_rng_states  # type: ignore[attr-defined]


def _said(module: ModuleType) -> None:
    theirs = module._log_device_info

    @functools.wraps(theirs)
    def _log_device_info(trainer: Any) -> None:
        """Theirs says that there is no TPU."""
        if not _ours(trainer.accelerator):
            return theirs(trainer)
        module.rank_zero_info(f"TPU available: True ({torch.tpu.get_device_name()}), "  # type: ignore[attr-defined]
                              f"using: {trainer.num_devices} chip(s)")

    module._log_device_info = _log_device_info  # type: ignore[attr-defined]
