"""The one module that touches JAX's private API. Tried on jax/jaxlib 0.10.2; tests/test_doors.py opens every door.

Why private: the public API narrows 64-bit dtypes unless a global option is set, costs 10 times more per transfer, and
offers no way to keep an executable that is not pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import _jax

XlaError = _jax.JaxRuntimeError


@contextmanager
def x64():
    """64-bit types for this thread, within the block only."""
    before = _config.enable_x64.swap_local(True)
    try:
        yield
    finally:
        _config.enable_x64.set_local(before)


def quiet_fork() -> None:
    """Before JAX starts: no warning at every fork of this process (each DataLoader worker is one). A fork that goes on
    to use the device gets torch_tpu's own error."""
    _xla_bridge._at_fork_handler_installed = True


def put(value: np.ndarray, device: Any) -> jax.Array:
    """Copies a NumPy array to the device, keeping 64-bit dtypes. The caller must not change `value` afterwards."""
    before = _config.enable_x64.swap_local(True)
    try:
        aval = jax.core.ShapedArray(value.shape, value.dtype)
        return _jax.batched_device_put(aval, jax.sharding.SingleDeviceSharding(device), [value], [device])
    finally:
        _config.enable_x64.set_local(before)


def import_dlpack(capsule: Any, device: Any) -> jax.Array:
    """The array in a DLPack capsule; shares memory when it is aligned to 64 bytes, copies otherwise."""
    before = _config.enable_x64.swap_local(True)
    try:
        return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None)
    finally:
        _config.enable_x64.set_local(before)


def export_dlpack(array: jax.Array) -> Any:
    """A DLPack capsule that shares the array's memory (CPU and GPU clients)."""
    return _jax.buffer_to_dlpack_managed_tensor(array)


def trace(fn: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], donate: Sequence[int] = ()) -> Any:
    """StableHLO (an MLIR module) of `fn` over flat arguments, traced with 64-bit types."""
    with x64():
        jitted = jax.jit(fn, donate_argnums=tuple(donate), keep_unused=True)
        return jitted.lower(*avals).compiler_ir("stablehlo")


def module_bytes(module: Any) -> bytes:
    """The module as text without source locations, so that equal programs give equal bytes."""
    return str(module.operation.get_asm(enable_debug_info=False)).encode()


def compile_options(device: Any, overrides: dict[str, Any] | None = None) -> Any:
    return _compiler.get_compile_options(
        1, 1, device_assignment=np.array([[device.id]]), env_options_overrides=overrides or None, backend=device.client)


def compile_module(module: Any, device: Any, options: Any) -> Any:
    return device.client.compile_and_load(module, _jax.DeviceList((device,)), options)


def load_executable(payload: bytes, device: Any, options: Any) -> Any:
    return device.client.deserialize_executable(payload, _jax.DeviceList((device,)), options)


def save_executable(executable: Any) -> bytes:
    return executable.serialize()


def execute(executable: Any, arrays: list[jax.Array]) -> list[jax.Array]:
    """Runs an executable on one device; returns one array an output, without waiting for them."""
    results = executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
    return [shards[0] for shards in results]


def client_version(device: Any) -> str:
    return f"{device.client.platform} {device.client.platform_version}"
