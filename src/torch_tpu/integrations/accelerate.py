"""Accelerate (tried on 1.15.0): its default device, its processes, and its lists of what devices can."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch

from ..runtime import chips
from . import on_import


def install() -> None:
    on_import.after("accelerate.state", _default_device)
    on_import.after("accelerate.state", _processes)
    on_import.after("accelerate.utils.modeling", _scaler)
    on_import.after("accelerate.accelerator", _float16)
    on_import.after("accelerate.utils.dataclasses", _dynamo_backend)
    on_import.after("accelerate.commands.config.config_utils", _dynamo_choice)
    on_import.after("accelerate.commands.launch", _launch)


def _default_device(module: ModuleType) -> None:
    state = module.PartialState
    theirs = state.default_device.fget

    def default_device(self: Any) -> torch.device:
        """The tpu chip where Accelerate itself finds nothing better than the CPU."""
        found = theirs(self)
        return torch.device("tpu", 0) if found.type == "cpu" else found

    state.default_device = property(default_device)


def _processes(module: ModuleType) -> None:
    """Several processes under torchrun are one distributed training, not as many separate ones.

    Accelerate's enumeration of distributed types cannot be extended; the code for MULTI_NEURON is its general one.
    """
    state = module.PartialState
    theirs = state._prepare_backend

    @functools.wraps(theirs)
    def _prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        found, kind = theirs(self, cpu, sagemaker_dp, backend)
        launched = int(os.environ.get("LOCAL_RANK", -1)) != -1 and int(os.environ.get("WORLD_SIZE", 1)) > 1
        if cpu or not launched or kind != module.DistributedType.NO or self.default_device.type != "tpu":
            return found, kind
        self.device = torch.device("tpu", 0)
        # DistributedDataParallel must not be told LOCAL_RANK as the number of its chip: each process has one.
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
        return backend or "tpu_dist", module.DistributedType.MULTI_NEURON

    state._prepare_backend = _prepare_backend


def _float16(module: ModuleType) -> None:
    """The literal list of devices with float16 in `Accelerator.__init__` gets one more."""
    code = module.Accelerator.__init__.__code__
    lists = [value for value in code.co_consts if isinstance(value, tuple) and {"cuda", "xpu", "mps"} <= {*value}]
    if len(lists) != 1:
        raise AttributeError("Accelerator.__init__ has not one list of the devices with float16")
    constants = tuple((*value, "tpu") if value is lists[0] else value for value in code.co_consts)
    module.Accelerator.__init__.__code__ = code.replace(co_consts=constants)


def _scaler(module: ModuleType) -> None:
    theirs = module.get_grad_scaler

    @functools.wraps(theirs)
    def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
        """Theirs is for CUDA where it knows no better, and then switches itself off."""
        if torch.cuda.is_available() or module.AcceleratorState().device.type != "tpu":
            return theirs(distributed_type, **kwargs)
        if distributed_type == module.DistributedType.FSDP:
            return theirs(distributed_type, **{"device": "tpu", **kwargs})
        return torch.amp.GradScaler("tpu", **kwargs)

    module.get_grad_scaler = get_grad_scaler  # type: ignore[attr-defined]


def _dynamo_backend(module: ModuleType) -> None:
    """`dynamo_backend="tpu"`: Accelerate enumerates the backends of torch.compile that it accepts."""
    kind = module.DynamoBackend
    if "TPU" in kind.__members__:
        return
    member = str.__new__(kind, "TPU")
    member._name_ = member._value_ = "TPU"
    kind._member_map_["TPU"] = kind._value2member_map_["TPU"] = member
    kind._member_names_.append("TPU")


def _dynamo_choice(module: ModuleType) -> None:
    """`accelerate launch --dynamo_backend tpu`."""
    if "TPU" not in module.DYNAMO_BACKENDS:
        module.DYNAMO_BACKENDS.append("TPU")


def _launch(module: ModuleType) -> None:
    theirs = module._validate_launch_command

    @functools.wraps(theirs)
    def _validate_launch_command(args: Any) -> Any:
        """One process for each chip of the host; several processes are one training, as with other accelerators."""
        if args.cpu or torch.cuda.is_available():
            return theirs(args)
        if args.num_processes is None and args.config_file is None and not os.path.isfile(module.default_config_file):
            args.num_processes = chips.count()
        args, defaults, precision = theirs(args)
        others = args.use_deepspeed or args.use_fsdp or args.use_megatron_lm or args.tpu
        if args.num_processes > 1 and not others and not args.use_cpu:
            args.multi_gpu = True
        return args, defaults, precision

    module._validate_launch_command = _validate_launch_command  # type: ignore[attr-defined]
