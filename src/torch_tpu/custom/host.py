"""Operators on CPU tensors: JAX's CPU client computes them, so that code can be tried without moving it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import torch

from ..runtime import dynamo_door, jax_door, pallas_door
from . import program


def run(traced: program.Traced, tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    """The program's results for CPU tensors, as CPU tensors."""
    with dynamo_door.untraced():
        compiled = _compile(traced, tuple(tensor.dtype for tensor in tensors), name)
        with jax_door.x64():
            arrays = [jax_door.import_dlpack(torch.utils.dlpack.to_dlpack(tensor.detach().contiguous()), device())
                      for tensor in tensors]
            return [torch.utils.dlpack.from_dlpack(jax_door.export_dlpack(array)) for array in compiled(*arrays)]


@functools.cache
def device() -> jax.Device:
    """JAX's CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(f"CPU tensors need JAX's CPU client, which JAX_PLATFORMS leaves out ({error}); move the "
                           "tensors to the tpu device") from error


@functools.lru_cache(maxsize=256)
def _compile(traced: program.Traced, kinds: tuple[torch.dtype, ...], name: str) -> jax.stages.Compiled:
    from ..runtime import dtypes

    shapes = [aval.shape for aval in traced.jaxpr.in_avals]
    placed = jax.sharding.SingleDeviceSharding(device())
    with jax_door.x64(), jax_door.lowering.ours():
        pallas_door.install_if_used()
        structs = [jax.ShapeDtypeStruct(shape, dtypes.to_numpy(kind), sharding=placed)
                   for shape, kind in zip(shapes, kinds)]
        return jax.jit(lambda *arrays: traced(arrays)).trace(*structs).lower().compile()
