"""Kernels that come as serialised StableHLO: what PyTorch's own Inductor writes for the device (torch 2.13, its Pallas
code), which registers a module once and calls it by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_kernels: dict[tuple[str, str], bytes] = {}
_programs: dict[tuple[str, str], Any] = {}


def lookup_custom_kernel(name: str, key: str) -> bool:
    """Whether the kernel is registered."""
    return (name, key) in _kernels


def register_custom_kernel(name: str, key: str, serialized_mlir_module: bytes) -> None:
    """Registers a kernel.

    Args:
        key: tells kernels of one name apart (their shapes).
        serialized_mlir_module: jax.export.Exported.mlir_module_serialized.
    """
    _kernels[name, key] = bytes(serialized_mlir_module)
    _programs.pop((name, key), None)


def call_custom_kernel(name: str, key: str, inputs: Sequence[torch.Tensor], output_shapes: Sequence[torch.Tensor],
                       donate_argnums: Sequence[int] = ()) -> list[torch.Tensor]:
    """Runs a registered kernel.

    Args:
        inputs: tensors on the device.
        output_shapes: tensors with the results' shapes and dtypes; they are not written.
        donate_argnums: inputs whose memory the kernel might take over. It does not: the caller goes on to write the
            results into them.

    Returns:
        The results, as new tensors.

    Raises:
        KeyError: the kernel is not registered.
        NotImplementedError: the kernel is Mosaic's, for TPU chips, and this process has virtual ones.
    """
    from ..eager import dispatcher
    from ..tensor import buffer

    dispatcher.load()
    if (name, key) not in _kernels:
        raise KeyError(f"kernel {name!r} with key {key!r} is not registered; call register_custom_kernel first")
    program = _programs.get((name, key))
    if program is None:
        program = _programs[name, key] = _compile(name, _kernels[name, key], len(inputs), output_shapes)
    arrays = []
    for tensor in inputs:
        whole = tensor.detach().clone(memory_format=torch.contiguous_format) if not _plain(tensor) else tensor
        held = buffer.of(whole)
        if held is None:
            raise RuntimeError(f"kernel {name}: an input lies on {tensor.device}; move it with .to('tpu')")
        arrays.append(held.array())
    return [buffer.wrap(array) for array in program(arrays)]


def _plain(tensor: torch.Tensor) -> bool:
    from ..tensor import buffer

    held = buffer.of(tensor)
    return held is None or (held.shape == tuple(tensor.shape) and tensor.is_contiguous())


def _compile(name: str, serialized: bytes, inputs: int, outputs: Sequence[torch.Tensor]) -> Any:
    import jax

    from ..runtime import client, dtypes, executable, jax_door

    module = jax_door.parse_module(serialized)
    if client.get().platform.virtual and b"tpu_custom_call" in jax_door.module_bytes(module):
        raise NotImplementedError(
            f"kernel {name} is compiled by Mosaic, for TPU chips; this process has virtual chips. Use "
            "torch.compile(backend=\"tpu\") in place of Inductor, or torch.tpu.pallas.jax_op for a Pallas kernel")
    takes = jax_door.module_arguments(module)
    if takes != inputs:
        raise ValueError(f"kernel {name} takes {takes} arrays, and {inputs} were given")
    results = [jax.ShapeDtypeStruct(tuple(each.shape), dtypes.to_numpy(each.dtype)) for each in outputs]
    return executable.of_module(module, results, name)
