"""Runs a JAX function that is no operator of its own on device tensors: the parts of data-dependent operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from ..lowering import strided
from ..runtime import dtypes, executable
from ..tensor import buffer

_programs: dict[tuple[Any, ...], executable.Executable] = {}


def call(fn: Callable[..., Sequence[Any]], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The function's results as new contiguous tensors. It sees the tensors' windows as JAX values."""
    held = []
    windows = []
    for tensor in tensors:
        found = buffer.of(tensor)
        if found is None:
            raise RuntimeError(f"{fn.__name__}: expected a tpu tensor, got one on {tensor.device}")
        held.append(found)
        windows.append((strided.of(tensor),
                        dtypes.to_numpy(tensor.dtype)))
    key = (fn, *((h.shape, h.dtype, *window) for h, window in zip(held, windows)))
    program = _programs.get(key)
    if program is None:
        def read_all(*arrays: Any) -> list[Any]:
            return list(fn(*(strided.read(a, view, kind) for a, (view, kind) in zip(arrays, windows))))

        avals = [jax.ShapeDtypeStruct(h.shape, h.dtype) for h in held]
        program = _programs[key] = executable.build(read_all, avals, fn.__name__)
    return [buffer.wrap(array) for array in program([h.array() for h in held])]
