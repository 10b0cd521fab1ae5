"""torch.tpu: what torch.cuda is for CUDA. One process drives one chip, tpu:0; every `device` argument accepts None, 0,
"tpu", "tpu:0" and torch.device("tpu"). Importing it starts nothing; JAX starts with the first operation."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import chips
from ..runtime.chips import Device
from . import eager
from .eager import get_eager_mode, set_eager_mode
from .memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
)
from .namespace import __path__ as __path__  # torch.tpu.distributed and its like are found through it
from .namespace import missing
from .properties import (
    DeviceProperties,
    get_device_capability,
    get_device_name,
    get_device_properties,
    is_bf16_supported,
)
from .rng import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import Event, Stream, current_stream, default_stream, set_stream, stream

__all__ = [
    "DeviceProperties", "Event", "Stream", "can_device_access_peer", "compile_step", "current_device",
    "current_stream", "default_generators", "default_stream", "device", "device_count", "device_of", "empty_cache",
    "explain", "fallback_report", "get_amp_supported_dtype", "get_device_capability", "get_device_name",
    "get_device_properties", "get_eager_mode", "get_rng_state",
    "get_rng_state_all", "init", "initial_seed", "ipc_collect", "is_available", "is_bf16_supported", "is_initialized",
    "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
    "memory_allocated", "memory_reserved", "memory_stats", "memory_summary", "mesh", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_peak_memory_stats", "seed", "seed_all", "set_device",
    "set_eager_mode", "set_fallback", "set_rng_state", "set_rng_state_all", "set_stream", "stream", "synchronize",
]

# Checkpointing (torch.utils.checkpoint) saves and replays this device's random numbers only where it is True.
_initialized = True


def is_available() -> bool:
    """Whether this process can use the device. Starts nothing.

    Raises:
        ValueError: a TORCH_TPU_* variable has a value that is not understood. (False would send the program to another
            device without a word.)
    """
    try:
        return not _is_in_bad_fork() and chips.count() > 0
    except RuntimeError:  # chips were demanded that are not there; using the device says so
        return False


def is_initialized() -> bool:
    """True: there is no state to set up before the device can be used, and DeviceMesh must not choose a chip."""
    return True


def init() -> None:
    """Starts JAX now instead of at the first operation."""
    from ..eager import dispatcher

    dispatcher.load()


def _lazy_init() -> None:
    if _is_in_bad_fork():
        from ..runtime import client

        raise client.fork_error()


def _is_in_bad_fork() -> bool:
    from ..runtime import client

    return client.forked


def device_count() -> int:
    """Chips of this host, virtual ones included. One process drives one of them."""
    return chips.count()


def current_device() -> int:
    return 0


def set_device(device: Device) -> None:
    """Accepts the process's only chip.

    Raises:
        RuntimeError: another chip was asked for.
    """
    chips.check(device)


def _exchange_device(device: int) -> int:
    chips.check(None if device < 0 else device)
    return 0


_maybe_exchange_device = _exchange_device


class device:
    """Context manager that selects a chip, of which there is one."""

    def __init__(self, device: Device) -> None:
        self.idx = chips.check(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class device_of(device):
    """Context manager that selects the chip of a tensor or storage; nothing for those of another device."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device if obj.device.type == "tpu" else None)


def synchronize(device: Device = None) -> None:
    """Waits for everything launched so far."""
    from ..runtime import client

    chips.check(device)
    eager.settle()
    client.synchronize()


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """False: chips exchange data through collectives only."""
    chips.check(device)
    return False


def ipc_collect() -> None:
    """Nothing to collect: device memory is not shared between processes."""


def compile_step(step: Any = None, *, optimizer: Any = None, loss: Any = None, max_grad_norm: float | None = None,
                 name: str = "", xla: dict[str, Any] | None = None, donate: bool = True) -> Any:
    """Makes forward, backward and optimizer update one executable. A decorator, or a call:

        @torch.tpu.compile_step
        def step(batch):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    or `step = torch.tpu.compile_step(model, optimizer=optimizer)`, and then `loss = step(**batch)`.

    Parameters, buffers, gradients and optimizer state stay ordinary tensors, updated in place: their memory is taken
    over by the program, and their values are up to date after each call. What the step returns is detached.

    The Python code runs at the first call of its kind, and again when what it depends on changes: shapes and dtypes of
    tensor arguments, other arguments that are no floats, train() and eval(), autocast, settings of the optimizer other
    than the learning rate, whether gradients are there. A learning rate and float arguments are inputs: a scheduler,
    called outside, compiles nothing. Random operators draw anew at each call. `.grad` is after the call what it would
    be in eager mode. CPU tensors among the arguments may be moved to the device inside. Side effects in Python
    (print, a list that grows) happen only when the code runs. Watched for changes are modules that the step calls
    (their parts, hooks, and attributes that are numbers), optimizers that it steps, and variables of the function
    itself; what lies elsewhere (a setting in an object of yours) is as it was when the code ran: pass it as an
    argument.

    Args:
        step: a function that does a whole step, or a module (then with `optimizer`).
        optimizer: of the module.
        loss: `loss(output, last argument)`; default: the module's output, or its `.loss`.
        max_grad_norm: for a module: clip the gradients' norm before the update.
        name: for logs and statistics.
        xla: XLA options of the program.
        donate: False keeps the old memory of what the step writes alive beside the new.

    Raises:
        torch_tpu.runtime.errors.CaptureError: at the first call, where the step does what one program cannot: reads a
            value on the host, draws random numbers there, uses an operator without a lowering. Nothing was computed.
    """
    from ..compile import step as compiled

    return compiled.compile_step(step, optimizer=optimizer, loss=loss, max_grad_norm=max_grad_norm, name=name, xla=xla,
                                 donate=donate)


def mesh(batch_axes: Any = ("dp", "fsdp"), **axes: int) -> Any:
    """Makes several chips of this process one device, tpu:0; XLA divides the programs among them.

        mesh = torch.tpu.mesh(tp=4)                       # or dp=2, tp=4, or fsdp=8
        model = mesh.shard(AutoModelForCausalLM.from_pretrained(name))
        model.generate(**inputs)                          # and everything else as with one chip

    No launcher, and no change in the code that follows: tensors have their full shapes, and results are those of one
    chip up to the order of sums. A tensor that nobody spreads is whole on every chip. Call it before the model is
    loaded; what the device did before goes on to work.

    Args:
        batch_axes: which of the axes divide the batch.
        axes: the name and the number of chips of each axis. `tp` divides matrices by the model's own plan, `fsdp`
            every parameter and the batch, `dp` the batch; other names are for rules and `Mesh.place`.

    Returns:
        A torch_tpu.mesh.Mesh; without arguments the mesh of this process, or None.

    Raises:
        ValueError: more chips than this process has (TORCH_TPU_VIRTUAL_CHIPS sets the number of virtual ones).
        RuntimeError: there is another mesh already, or this process is one of a distributed job.
    """
    from ..mesh import mesh as make

    return make(batch_axes, **axes)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What torch.autocast("tpu") accepts; bfloat16 is the default."""
    from ..eager import autocast  # noqa: F401  (registers the autocast rules)

    return [torch.bfloat16, torch.float16]


def explain() -> str:
    """What torch.compile compiled in this process and why each time, as a table to print. See
    torch.tpu.compiler.explain."""
    from ..compile import compiler

    return compiler.explain()


def fallback_report() -> dict[str, int]:
    """How often each operator ran on the CPU in this process because tpu has no lowering for it."""
    from ..eager import dispatcher

    if not dispatcher.loaded():
        return {}
    from ..eager import fallback

    return fallback.report()


def set_fallback(mode: str) -> None:
    """What an operator that only the CPU has does: "warn" (once each), "silent" or "error"."""
    from ..eager import fallback

    fallback.set_mode(mode)


def __getattr__(name: str) -> Any:
    return missing(name)
