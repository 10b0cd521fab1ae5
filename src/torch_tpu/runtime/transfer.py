"""Host <-> device: CPU tensors to JAX arrays and back, any dtype and stride, from any thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import client, dtypes, jax_door, partition

_SCALARS: dict[tuple[type, Any, Any], Any] = {}
_SCALAR_LIMIT = 8192


def to_device(tensor: torch.Tensor, sharding: Any = None) -> Any:
    """A JAX array with the values of a CPU tensor, in its logical shape. Always a copy: later writes to the tensor
    do not reach the device. On a mesh every chip gets it, or (with a sharding) its part."""
    kind = dtypes.to_numpy(tensor.dtype)
    chip = client.get()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if partition.current is not None:
        return partition.current.put(_numpy(tensor.contiguous(), kind), sharding or partition.current.replicated)
    if chip.platform.virtual and tensor.numel():
        # One copy, by torch, into memory of torch's own alignment (64 bytes), which XLA then uses as it is.
        own = torch.empty(tensor.shape, dtype=tensor.dtype)
        own.copy_(tensor)
        return jax_door.import_dlpack(torch.utils.dlpack.to_dlpack(own), chip.device)
    return jax_door.put(_numpy(tensor.contiguous(), kind), chip.device)


def to_host(array: Any) -> torch.Tensor:
    """A CPU tensor with the values of a JAX array; waits for it. Independent of the device's memory."""
    chip = client.get()
    array.block_until_ready()
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtypes.to_torch(array.dtype))
    if partition.current is not None and array.is_fully_replicated:
        array = array.addressable_data(0)
    if len(array.devices()) == 1 and chip.platform.virtual:
        return torch.utils.dlpack.from_dlpack(jax_door.export_dlpack(array)).clone()
    host = np.array(array)
    kind = dtypes.to_torch(host.dtype)
    if kind in _NUMPY_NATIVE:
        return torch.from_numpy(host)
    return torch.from_numpy(host.view(np.dtype(f"u{host.dtype.itemsize}"))).view(kind)


def host_value(value: np.ndarray) -> Any:
    """A small array that the host computed (a scalar, random keys), for a program; nobody may change `value` later."""
    if partition.current is not None:
        return partition.current.put(value, partition.current.replicated)
    return jax_door.put(value, client.get().device)


def scalar(value: Any, kind: np.dtype) -> Any:
    """A 0-d array; the common ones are kept, so that a scalar costs no transfer the second time."""
    key = (type(value), value, kind)
    if value == 0 or value != value:  # -0.0 equals 0.0, and nan nothing
        key = (type(value), repr(value), kind)
    found = _SCALARS.get(key)
    if found is None:
        found = host_value(np.asarray(value, kind))
        if len(_SCALARS) >= _SCALAR_LIMIT:
            _SCALARS.clear()
        _SCALARS[key] = found
    return found


_NUMBERS: dict[Any, Any] = {}


def number(value: float | int) -> Any:
    """A 0-d float64 or int64 array of a Python number; the common ones are kept."""
    found = _NUMBERS.get(value)
    if found is None or found[0] is not type(value) or not value:  # 1 equals 1.0, and 0.0 equals -0.0
        kind = np.dtype(np.float64 if type(value) is float else np.int64)
        found = (type(value), scalar(value, kind))
        if len(_NUMBERS) >= _SCALAR_LIMIT:
            _NUMBERS.clear()
        _NUMBERS[value] = found
    return found[1]


def clear() -> None:
    """Forgets the scalars that are kept on the device."""
    _SCALARS.clear()
    _NUMBERS.clear()


_NUMPY_NATIVE = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
                 torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64,
                 torch.complex128}


def _numpy(tensor: torch.Tensor, kind: np.dtype) -> np.ndarray:
    """A NumPy copy of a contiguous CPU tensor, also of dtypes that torch cannot hand to NumPy."""
    if tensor.dtype in _NUMPY_NATIVE:
        return tensor.numpy().copy()
    return tensor.view(torch.uint8 if kind.itemsize == 1 else torch.int16).numpy().copy().view(kind)
