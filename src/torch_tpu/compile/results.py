"""What a captured step returns, made anew from the outputs of each run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..runtime import errors
from ..tensor import buffer, torch_door
from . import symbol
from .capture import External, Recorder
from .tape import Value

Tensor = torch.Tensor


def returned(result: Any, recorder: Recorder, outputs: list[Value],
              flat: list[Any]) -> Callable[[list[Any], list[Any], int], Any]:
    """What makes the step's result from the program's outputs."""
    leaves, spec = pytree.tree_flatten(result)
    makers: list[Callable[[list[Any], list[Any], int, dict[int, Tensor]], Any]] = []
    places: dict[int, int] = {}
    for leaf in leaves:
        expression = symbol.expression(leaf)
        if expression is not None:
            raise errors.CaptureError("the step returns a Python number that it computes on the device (item()); "
                                      "return the tensor, and call item() on it outside")
        if isinstance(leaf, Tensor) and leaf.device.type == "tpu":
            owner = recorder.owner(leaf)
            window = tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype
            if isinstance(owner, External):
                position = next((i for i, given in enumerate(flat) if isinstance(given, Tensor)
                                 and buffer.of(given) is owner.buffer), None)
                source = leaf.detach() if position is None else None
                makers.append(functools.partial(_give_external, source, position, window))
            else:
                if id(owner) not in places:
                    places[id(owner)] = len(outputs)
                    outputs.append(owner.value)
                makers.append(functools.partial(_give_output, places[id(owner)], window))
        elif isinstance(leaf, Tensor):
            known = recorder.host_made.get(leaf.untyped_storage()._cdata)
            if known is None or known[1]:
                raise errors.CaptureError("the step returns a CPU tensor that depends on its inputs; the host's part "
                                          "of a step runs only once")
            makers.append(functools.partial(lambda value, *_: value, leaf))
        elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            makers.append(functools.partial(lambda value, *_: value, leaf))
        else:
            raise errors.CaptureError(f"the step returns a {type(leaf).__name__}; return tensors, or tuples, lists and "
                                      "dicts of them")

    def make_all(results: list[Any], given: list[Any], offset: int) -> Any:
        shared: dict[int, Tensor] = {}
        return pytree.tree_unflatten([make(results, given, offset, shared) for make in makers], spec)

    return make_all


def _give_external(source: Tensor | None, position: int | None, window: Any, results: Any, given: Any, offset: int,
                   shared: Any) -> Tensor:
    tensor = source if position is None else given[position].detach()
    assert tensor is not None
    return torch_door.as_strided(tensor, *window[:3])


def _give_output(position: int, window: Any, results: list[Any], given: Any, offset: int,
                 shared: dict[int, Tensor]) -> Tensor:
    base = shared.get(position)
    if base is None:
        base = shared[position] = buffer.wrap(results[position + offset])
    sizes, strides, start, dtype = window
    if base.dtype != dtype:
        base = base.view(dtype)
    return base if (tuple(base.shape), base.stride(), 0) == (sizes, strides, start) else torch_door.as_strided(
        base, sizes, strides, start)
