"""The one module that touches JAX's private API. Tried on jax/jaxlib 0.10.2; tests/test_doors.py opens every door.

Why private: the public API narrows 64-bit dtypes unless a global option is set, costs 10 times more per transfer, and
offers no way to keep an executable that is not pickled.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.export
import jax.extend.core
import numpy as np
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import sharding as _sharding
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import lax as _lax
from jax._src.lib import _jax
from jax._src.lib import xla_client as _xla_client

from .coordinator import HEARTBEAT_S

XlaError = _jax.JaxRuntimeError
_IndivisibleError = _sharding.IndivisibleError


class _Lowering(threading.local):
    """Whether this thread lowers a program of ours: then Pallas kernels run on CPUs too (pallas_door.py)."""

    active = False

    @contextmanager
    def ours(self):
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before


lowering = _Lowering()


@contextmanager
def x64():
    """64-bit types for this thread, within the block only."""
    before = _config.enable_x64.swap_local(True)
    try:
        yield
    finally:
        _config.enable_x64.set_local(before)


@contextmanager
def width(wide: bool):
    """64-bit types, or none, for this thread within the block."""
    before = _config.enable_x64.swap_local(wide)
    try:
        yield
    finally:
        _config.enable_x64.set_local(before)


def users_width() -> bool:
    """Whether the user's own JAX code has 64-bit types."""
    return bool(_config.enable_x64.get_global())


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
    """`fn` over flat arguments, traced with 64-bit types; `.jaxpr` keeps nothing that `fn` holds."""
    with x64():
        return jax.jit(fn, donate_argnums=tuple(donate), keep_unused=True).trace(*avals)


def results(traced: Any) -> list[Any]:
    """Shapes and dtypes of the flat results of a traced function."""
    return jax.tree.leaves(traced.out_info)


def lower(traced: Any, platform: str | None = None) -> Any:
    """StableHLO (an MLIR module) of a traced function, for JAX's own platform or the one that is named."""
    with x64(), lowering.ours():
        return traced.lower(lowering_platforms=None if platform is None else (platform,)).compiler_ir("stablehlo")


def replay(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Inside a trace: the flat results of a traced function, given by its jaxpr."""
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arguments)


def weak(value: Any, kind: type) -> Any:
    """Inside a trace: a 0-d value as the Python number (float or int) that it stands for, which promotes weakly."""
    return _lax._convert_element_type(value, np.dtype(kind), weak_type=True)


def module_bytes(module: Any) -> bytes:
    """The module as text without source locations, so that equal programs give equal bytes."""
    return str(module.operation.get_asm(enable_debug_info=False)).encode()


def named_module_bytes(module: Any) -> bytes:
    """The module as text with source locations, which hold the names of scopes."""
    return str(module.operation.get_asm(enable_debug_info=True)).encode()


def parse_module(exported: bytes) -> Any:
    """The MLIR module of a portable artifact, as jax.export serialises it."""
    with _mlir.make_ir_context():
        return _jax.mlir.deserialize_portable_artifact(exported)


def module_arguments(module: Any) -> int:
    """How many arguments a module's main function takes."""
    for operation in module.body.operations:
        if "main" in str(operation.attributes["sym_name"]):
            return len(operation.attributes["function_type"].value.inputs)
    raise ValueError("the module has no main function")


def compile_options(device: Any, overrides: dict[str, Any] | None = None, replicas: Sequence[Any] = ()) -> Any:
    """For one device, or for one program on several processes' devices (`replicas`, this process's among them)."""
    assignment = np.array([[each.id] for each in replicas or (device,)])
    return _compiler.get_compile_options(len(assignment), 1, device_assignment=assignment,
                                         env_options_overrides=overrides or None, backend=device.client)


def compile_module(module: Any, device: Any, options: Any, replicas: Sequence[Any] = ()) -> Any:
    return device.client.compile_and_load(module, _jax.DeviceList(tuple(replicas) or (device,)), options)


def load_executable(payload: bytes, device: Any, options: Any, replicas: Sequence[Any] = ()) -> Any:
    return device.client.deserialize_executable(payload, _jax.DeviceList(tuple(replicas) or (device,)), options)


def save_executable(executable: Any) -> bytes:
    return executable.serialize()


def outputs(infos: Sequence[Any], device: Any) -> list[Any]:
    """What makes jax.Arrays of an executable's outputs: one for each of the shapes and dtypes that `trace` gave."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    with x64():
        return [_jax.array_result_handler(jax.core.ShapedArray(info.shape, info.dtype), sharding, committed=True,
                                          _skip_checks=True) for info in infos]


def execute(executable: Any, arrays: list[jax.Array], makers: list[Any]) -> list[jax.Array]:
    """Runs an executable on one device; returns one array an output, without waiting for them. (Half the time of
    disassemble_into_single_device_arrays.)"""
    return executable.execute_sharded(arrays).consume_with_handlers(makers)


# Programs that XLA divides among the chips of a mesh


def mesh(chips: Sequence[Any], axes: dict[str, int]) -> Any:
    """A JAX mesh whose shardings XLA propagates."""
    return jax.sharding.Mesh(np.array(chips, dtype=object).reshape(tuple(axes.values())), tuple(axes))


def abstract_mesh(axes: dict[str, int]) -> Any:
    """A mesh of chips that are not here."""
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def named_sharding(grid: Any, spec: Sequence[Any]) -> Any:
    return jax.sharding.NamedSharding(grid, jax.sharding.PartitionSpec(*spec))


def on_mesh(sharding: Any, grid: Any) -> bool:
    return isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh is grid


def spread(array: jax.Array, sharding: Any) -> jax.Array:
    """The array's values on the chips of a sharding, keeping 64-bit dtypes."""
    with x64():
        return jax.device_put(array, sharding)


def put_parts(value: np.ndarray, sharding: Any) -> jax.Array:
    """A NumPy array on the chips of a sharding, each of which gets only its own part."""
    chips = list(sharding.mesh.devices.flat)
    indices = sharding.devices_indices_map(value.shape)
    with x64():
        aval = jax.core.ShapedArray(value.shape, value.dtype)
        return _jax.batched_device_put(aval, sharding, [value[indices[chip]] for chip in chips], chips)


def export(program: Callable[..., Any], avals: Sequence[Any], donate: Sequence[int], platform: str) -> bytes:
    """A function over flat arguments, serialised for a platform by jax.export. Custom calls of XLA's CPU library are
    let through: they are read by the same version."""
    checks = [jax.export.DisabledSafetyCheck.custom_call("*")] if platform == "cpu" else []
    with x64(), lowering.ours():
        jitted = jax.jit(program, donate_argnums=tuple(donate), keep_unused=True)
        return bytes(jax.export.export(jitted, platforms=(platform,), disabled_checks=checks)(*avals).serialize())


def exported(data: bytes) -> Callable[..., list[Any]]:
    """Inside a trace: what calls a function that `export` serialised."""
    read = jax.export.deserialize(bytearray(data))
    return lambda *arrays: list(read.call(*arrays))


def is_literal(atom: Any) -> bool:
    """Whether an argument of an equation is a constant in it."""
    return isinstance(atom, jax.extend.core.Literal)


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Inside a trace: the results of one equation of a jaxpr."""
    primitive = equation.primitive
    source = equation.source_info
    names = _source_info.current_name_stack() + source.name_stack
    with equation.ctx.manager, _source_info.user_context(source.traceback, name_stack=names):
        made = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return list(made) if primitive.multiple_results else [made]


def constrain(value: Any, sharding: Any) -> Any:
    """Inside a trace: the value, spread so at this point."""
    return jax.lax.with_sharding_constraint(value, sharding)


def lower_over(program: Callable[..., Any], avals: Sequence[Any], given: Sequence[Any], wanted: Sequence[Any],
               donate: Sequence[int], platform: str | None = None) -> Any:
    """StableHLO of a function whose arguments are spread as `given`, and its results as `wanted` (None: as XLA
    likes), for JAX's own platform or the one that is named."""
    with x64(), lowering.ours():
        jitted = jax.jit(program, in_shardings=tuple(given), out_shardings=list(wanted),
                         donate_argnums=tuple(donate), keep_unused=True)
        named = None if platform is None else (platform,)
        return jitted.trace(*avals).lower(lowering_platforms=named).compiler_ir("stablehlo")


def partition_options(chips: Sequence[Any], free: Sequence[bool], overrides: dict[str, Any] | None = None) -> Any:
    """For one program divided among chips. `free`: of each result, whether XLA chooses how it is spread."""
    assignment = np.array([[chip.id for chip in chips]])
    options = _compiler.get_compile_options(1, len(chips), device_assignment=assignment,
                                            env_options_overrides=overrides or None, backend=chips[0].client)
    options.executable_build_options.allow_spmd_sharding_propagation_to_output = list(free)
    return options


def output_specs(executable: Any, grid: Any, ranks: Sequence[int]) -> list[tuple[Any, ...] | None]:
    """How an executable's results, of so many dimensions, are spread over the mesh; None where its axes have no name
    for it."""
    found = executable.get_output_shardings() or []
    if len(found) == 1 and len(ranks) > 1:  # XLA keeps one where all are equal
        found = list(found) * len(ranks)
    if len(found) != len(ranks):
        raise RuntimeError(f"tpu: XLA states {len(found)} output shardings for {len(ranks)} results")
    return [_spec(sharding, grid, rank) for sharding, rank in zip(found, ranks)]


def _spec(sharding: Any, grid: Any, rank: int) -> tuple[Any, ...] | None:
    try:
        parsed = _sharding_impls.parse_flatten_op_sharding(sharding, grid)[0]
    except (ValueError, NotImplementedError, _IndivisibleError):
        return None
    names = tuple(axes if isinstance(axes, tuple) else (() if axes is None else (axes,)) for axes in parsed)
    return tuple(None if not n else n[0] if len(n) == 1 else n for n in names) if len(names) <= rank else None


def outputs_over(infos: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """As `outputs`, of a program over a mesh."""
    with x64():
        return [_jax.array_result_handler(jax.core.ShapedArray(info.shape, info.dtype), sharding, committed=True,
                                          _skip_checks=True) for info, sharding in zip(infos, shardings)]


def client_version(device: Any) -> str:
    return f"{device.client.platform} {device.client.platform_version}"


def backends_started() -> bool:
    return _xla_bridge.backends_are_initialized()


def without_chips() -> None:
    """Before JAX starts, on a host that has no TPU chip: JAX does not try libtpu, which where it is installed takes
    seconds to find none, and prints what it misses."""
    factory = _xla_bridge._backend_factories.get("tpu")
    if factory is None or _xla_bridge.backends_are_initialized() or _config.jax_platforms.value:
        return

    def none() -> Any:
        raise RuntimeError("this host has no TPU chip")

    _xla_bridge._backend_factories["tpu"] = dataclasses.replace(factory, factory=none, fail_quietly=True)


def virtual_chips(count: int) -> None:
    """Before JAX starts: its CPU client shows this many devices in this process (as the option jax_num_cpu_devices
    would for the user's JAX code, too)."""
    factory = _xla_bridge._backend_factories["cpu"]

    def make_cpu_client() -> Any:
        state = _distributed.global_state
        return _xla_client.make_cpu_client(
            asynchronous=_xla_bridge._CPU_ENABLE_ASYNC_DISPATCH.value, distributed_client=state.client,
            node_id=state.process_id, num_nodes=state.num_processes, collectives=None, num_devices=count)

    _xla_bridge._backend_factories["cpu"] = dataclasses.replace(factory, factory=make_cpu_client)


def connect(address: str, rank: int, world: int, seconds: int, own_address: str) -> Any:
    """Makes this process one of a job; must come before JAX's backends start. On virtual chips the data go through
    gloo, bound to `own_address`. (jax.distributed.initialize would also wait for the others at every exit, so a rank
    that fails would not end.) JAX ends the process when the coordinator is gone; it has no other way to tell it."""
    client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=seconds, heartbeat_timeout=HEARTBEAT_S, shutdown_on_destruction=False,
        use_compression=True)
    client.connect()
    state = _distributed.global_state
    state.client, state.process_id, state.num_processes, state.coordinator_address = client, rank, world, address
    factory = _xla_bridge._backend_factories["cpu"]

    def make_cpu_client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=own_address)
        return _xla_bridge.make_cpu_client(collectives)

    _xla_bridge._backend_factories["cpu"] = dataclasses.replace(factory, factory=make_cpu_client)
    return client
