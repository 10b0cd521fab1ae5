"""Tensors as JAX arrays and back, sharing memory."""

from __future__ import annotations

from typing import Any

import jax
import torch

from ..runtime import client, dtypes, partition
from . import buffer


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The tensor as a JAX array on the same chip.

    No copy where the tensor is contiguous and the whole of its storage (a view is copied on the device). The array is
    a value: later in-place operations on the tensor do not change it. 64-bit dtypes keep their width; JAX code that
    computes with them needs `jax.enable_x64`.

    Raises:
        TypeError: not a tensor on tpu.
        RuntimeError: the tensor requires a gradient, which JAX would not carry on; use tensor.detach().
    """
    if not isinstance(tensor, torch.Tensor) or buffer.of(tensor) is None:
        where = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise TypeError(f"to_jax takes a tensor on tpu, got {where}; move it with .to('tpu')")
    if tensor.requires_grad:
        raise RuntimeError("Can't call to_jax() on a tensor that requires grad. Use tensor.detach() first.")
    kind = dtypes.to_numpy(tensor.dtype)
    held = buffer.of(tensor)
    assert held is not None
    if not (held.shape == tuple(tensor.shape) and tensor.is_contiguous() and held.dtype == kind
            and not tensor.is_conj() and not tensor.is_neg()):
        tensor = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        held = buffer.of(tensor)
        assert held is not None
    array = held.array()
    held.shared = True
    return array


def from_jax(array: Any) -> torch.Tensor:
    """A tensor on tpu over a JAX array, without a copy. The array stays valid: an in-place operation on the tensor
    writes to new memory.

    Raises:
        TypeError: not a JAX array, or a dtype that PyTorch does not have.
        ValueError: the array lies on another device, or is spread over several.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError("from_jax takes an array with a value, not one that JAX is tracing (in jax.jit or jax.grad)")
    if not isinstance(array, jax.Array):
        raise TypeError(f"from_jax takes a jax.Array, got a {type(array).__name__}; torch.as_tensor takes others")
    chip = client.get().device
    if array.is_deleted():
        raise ValueError("from_jax: the array was deleted or donated")
    mesh = partition.current
    if array.devices() != {chip} and (mesh is None or array.devices() != set(mesh.chips)):
        raise ValueError(f"from_jax: the array lies on {sorted(map(str, array.devices()))}, this process's chip is "
                         f"{chip}; move it with jax.device_put(array, jax.local_devices(backend="
                         f"{client.get().platform.name!r})[0])")
    dtypes.to_torch(array.dtype)
    tensor = buffer.wrap(array)
    held = buffer.of(tensor)
    assert held is not None
    held.shared = True
    return tensor
