"""Copies of models and inputs whose tensors are on the device and have no memory: a model of any size is traced."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..tensor import buffer

Tensor = torch.Tensor


def tensor(sizes: Any, dtype: torch.dtype, strides: Any = None) -> Tensor:
    """A device tensor without memory."""
    sizes = tuple(sizes)
    strides = buffer.contiguous(sizes) if strides is None else tuple(strides)
    return buffer.empty(sizes, strides, dtype, buffer.Buffer.uncounted)


def like(value: Tensor) -> Tensor:
    """A device tensor without memory in the form of another one; one on the device is itself."""
    if value.device.type == "tpu":
        return value
    made = tensor(value.shape, value.dtype, value.stride())
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(made, value.requires_grad)
    return made.requires_grad_(value.requires_grad) if value.is_leaf else made


class _Copying(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            value, memo = args
            if id(value) not in memo:
                memo[id(value)] = like(value)
            return memo[id(value)]
        return func(*args, **(kwargs or {}))


def copy_of(value: Any) -> Any:
    """A deep copy of a structure of arguments (tensors, modules, optimizers, plain objects). A module's parameters and
    buffers move; tensors that are plain attributes of a module stay where they are, as in Module.to."""
    memo: dict[int, Any] = {}
    for module in _modules(value):
        for held in (*module.parameters(), *module.buffers()):
            if id(held) not in memo:
                memo[id(held)] = like(held)
        for part in module.modules():
            for attribute in vars(part).values():
                if isinstance(attribute, Tensor) and id(attribute) not in memo:
                    memo[id(attribute)] = attribute
    with _Copying():
        return copy.deepcopy(value, memo)


def _modules(value: Any) -> list[torch.nn.Module]:
    if isinstance(value, torch.nn.Module):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for item in value for each in _modules(item)] if isinstance(value, list | tuple) else []
