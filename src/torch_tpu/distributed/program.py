"""A collective as one small executable over the devices of a group's processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from ..lowering import collective
from ..runtime import client, dtypes, executable
from ..tensor import buffer

_programs: dict[tuple[Any, ...], executable.Executable] = {}

Body = Callable[..., Sequence[Any]]


def devices(ranks: Sequence[int]) -> list[Any]:
    """The chips of the given processes of the job, in that order."""
    chip = client.get()
    by_process = {device.process_index: device for device in chip.jax.devices(chip.platform.name)}
    if chip.platform.name == "tpu":
        return [by_process[process] for process in _processes_by_rank(ranks, by_process)]
    return [by_process[rank] for rank in ranks]


def _processes_by_rank(ranks: Sequence[int], by_process: dict[int, Any]) -> list[int]:
    missing = [rank for rank in ranks if rank not in by_process]
    if missing:
        raise RuntimeError(
            f"tpu: libtpu shows processes {sorted(by_process)}, but the group has rank(s) {missing}: the slice was not "
            "started with one process a chip. Call torch.tpu.distributed.set_tpu_launch_env() in the parent before "
            "torchrun.")
    return list(ranks)


def dense(tensor: torch.Tensor) -> Any:
    """A JAX array of the tensor's shape with its values."""
    held = buffer.of(tensor)
    assert held is not None
    if held.shape == tuple(tensor.shape) and tensor.is_contiguous() and held.dtype == dtypes.to_numpy(tensor.dtype) \
            and not tensor.is_conj() and not tensor.is_neg():
        return held.array()
    copied = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    held = buffer.of(copied)
    assert held is not None
    if held.shape != tuple(tensor.shape):
        raise RuntimeError(f"tpu: a clone of shape {tuple(tensor.shape)} has memory of shape {held.shape}")
    return held.array()


def store(tensor: torch.Tensor, array: Any) -> None:
    """Writes an array of as many elements into a tensor, without a copy where the tensor is all of its storage."""
    held = buffer.of(tensor)
    assert held is not None
    if held.shape == tuple(array.shape) == tuple(tensor.shape) and tensor.is_contiguous() and held.dtype == array.dtype:
        held.rebind(array)
        return
    with torch.no_grad():
        tensor.detach().copy_(buffer.wrap(array).view(tensor.shape))


def run(name: str, body: Body, static: tuple[Any, ...], arrays: list[Any], ranks: tuple[int, ...]) -> list[Any]:
    """Runs `body(*arrays, groups)` on all ranks of the group; the arrays of each rank have the same shapes."""
    key = (name, static, ranks, *((a.shape, a.dtype) for a in arrays))
    found = _programs.get(key)
    if found is None:
        groups = collective.one_group(len(ranks))

        def program(*values: Any) -> list[Any]:
            return list(body(*values, groups))

        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        found = _programs[key] = executable.build(program, avals, name, replicas=devices(ranks))
    return found(arrays)
