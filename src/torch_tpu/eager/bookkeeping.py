"""Small integer tensors whose values the host knows are computed on the host.

Token ids, attention masks, positions and lengths grow by one at every step of a generation, and differ for every prompt
and every last batch. As device programs each size would be compiled, and each `.item()` would wait. A tensor that came
from the host (`.to("tpu")`, `torch.ones(..., dtype=torch.int64, device="tpu")`) therefore keeps its bytes here too, in
its buffer's `mirror`; an operator over nothing but such tensors runs on CPU PyTorch, whose semantics it has anyway. The
device gets the result when a program needs it. Integers that the device computed stay there, but for the few of a
sampled token (`PULL`) that meet tensors of the host.

TORCH_TPU_HOST_INTEGERS=off turns this off. It is no fallback: floating point never runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..runtime import config, dtypes, transfer
from ..tensor import buffer, torch_door

Tensor = torch.Tensor

KINDS = frozenset((torch.bool, torch.int64, torch.int32))
LIMIT = 1 << 20  # elements of all tensors of a call; the mask of a 512-token prefill over 1,024 slots is half of it
PULL = 64  # elements of a tensor that is fetched from the device

_switch = config.Switch(config.HOST_INTEGERS)
on = _switch.on
set = _switch.set

runs = 0  # operators that ran here


def _flat(values: Tensor) -> Tensor:
    """The bytes of a dense CPU tensor, in memory order."""
    flat = values.reshape(-1)
    if flat.stride(0) != 1:  # a single element may carry any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def keep(held: buffer.Buffer, values: Tensor) -> None:
    """Makes a CPU tensor in the buffer's own order, which nobody else changes, the buffer's data."""
    held.keep(_flat(values))


def make(values: Tensor) -> Tensor:
    """A device tensor with the values, dtype and strides of a dense CPU tensor that nobody else changes."""
    sizes, strides = tuple(values.shape), values.stride()
    if values.is_contiguous():
        strides = buffer.contiguous(sizes)
        flat = values
    else:
        order = buffer.dense_order(sizes, strides)
        if order is None:
            values = values.contiguous()
            return make(values)
        flat = values.permute(order)
    held = buffer.Buffer(buffer.kind(tuple(flat.shape), dtypes.to_numpy(values.dtype)))
    held.keep(_flat(flat))
    tensor = torch_door.new_tensor(sizes, strides, values.dtype)
    tensor.untyped_storage()._tpu_buffer = held  # type: ignore[attr-defined]
    return tensor


def small(tensor: Tensor) -> bool:
    """Whether a tensor's values may be kept here."""
    return tensor.dtype in KINDS and tensor.numel() <= LIMIT and on()


def known(tensor: Tensor) -> Tensor | None:
    """The tensor's values as a window on its buffer's mirror; None where the host does not have them."""
    held = buffer.of(tensor)
    if held is None or held.mirror is None:
        return None
    return held.mirror.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _No(Exception):
    """This call does not belong here."""


class _Call:
    def __init__(self) -> None:
        self.elements = 0
        self.known = False
        self.waiting: list[buffer.Buffer] = []
        self.homes: dict[int, Tensor] = {}
        self.held: dict[int, buffer.Buffer] = {}

    def look(self, value: Any) -> None:
        """Counts the tensors of an argument."""
        if isinstance(value, Tensor):
            if value.dtype not in KINDS:
                raise _No
            held = getattr(value.untyped_storage(), "_tpu_buffer", None)
            if held is None:
                if value.dim() or not value.is_cpu:
                    raise _No
                return
            self.elements += held.kind.nbytes // value.element_size()
            if self.elements > LIMIT:
                raise _No
            if held.mirror is not None:
                self.known = True
            elif held.written() and held.kind.nbytes > PULL * 8:
                raise _No
            else:
                self.waiting.append(held)
        elif isinstance(value, list | tuple):
            for item in value:
                self.look(item)

    def here(self, value: Any) -> Any:
        """The argument with its tensors as windows on mirrors."""
        if isinstance(value, Tensor):
            held = getattr(value.untyped_storage(), "_tpu_buffer", None)
            if held is None:
                return value
            window = held.mirror.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
            self.homes[id(window)] = value
            self.held[id(window)] = held
            return window
        if isinstance(value, list | tuple):
            return [self.here(item) for item in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def back(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            home = self.homes.get(id(value))
            return make(value) if home is None else home
        if isinstance(value, list | tuple):
            return type(value)(self.back(item) for item in value)
        return value


def run(op: Any, args: Sequence[Any], kwargs: dict[str, Any], writes: Sequence[str] = ()) -> Any:
    """The result of an operator over known integers; NotImplemented when the call has to go to the device.

    Args:
        op: an overload without out= arguments that returns new tensors, or arguments that it writes.
        args, kwargs: its arguments.
        writes: names of arguments that it changes in place.
    """
    global runs
    call = _Call()
    try:
        for value in args:
            call.look(value)
        for value in kwargs.values():
            call.look(value)
    except _No:
        return NotImplemented
    if not call.known or kwargs.get("dtype", torch.int64) not in KINDS:
        return NotImplemented
    for held in call.waiting:
        pull(held)
    windows = [call.here(value) for value in args]
    named = {name: call.here(value) for name, value in kwargs.items()}
    try:
        with torch._C._DisableTorchDispatch():
            result = op(*windows, **named)
    except NotImplementedError:  # a dtype that only the device has the operator for (histc of integers)
        return NotImplemented
    runs += 1
    if writes:
        for argument, window in zip(op._schema.arguments, windows):
            if argument.name in writes:
                for each in window if isinstance(window, list) else (window,):
                    call.held[id(each)].changed()
    return call.back(result)


def factory(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operator without tensor arguments; NotImplemented when it has to go to the device."""
    global runs
    dtype = kwargs.get("dtype")
    if dtype is None:
        numbers = [value for value in args if not isinstance(value, list | tuple)]
        if op._schema.name not in _INFERS or not numbers or any(not isinstance(n, int) for n in numbers):
            return NotImplemented
    elif dtype not in KINDS:
        return NotImplemented
    if any(np.prod(value, dtype=np.float64) > LIMIT for value in args if isinstance(value, list | tuple)):
        return NotImplemented
    named = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    named["device"] = torch.device("cpu")
    with torch._C._DisableTorchDispatch():
        result = op(*args, **named)
    runs += 1
    return make(result) if result.numel() <= LIMIT else NotImplemented


_INFERS = {"aten::full"}  # factories whose dtype is that of their numbers


def pull(held: buffer.Buffer) -> None:
    """Gets a buffer's mirror from the device, or zero where nothing was written yet."""
    if held.mirror is not None:
        return
    if held.written():
        held.remember(_flat(transfer.to_host(held.array())))
    else:
        held.keep(torch.zeros(held.kind.nbytes, dtype=torch.uint8))
