"""How a tensor's data is spread over the chips of the process's mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime import partition
from ..runtime.partition import Spec
from . import buffer


def _order(tensor: torch.Tensor, held: buffer.Buffer) -> tuple[int, ...]:
    """Which dimension of the tensor each dimension of its memory is.

    Raises:
        ValueError: the tensor is a part of its memory, or has gaps.
    """
    order = buffer.dense_order(tensor.shape, tensor.stride())
    if order is not None and tensor.storage_offset() == 0:
        shape = tuple(tensor.shape[d] for d in order)
        if shape == held.shape:
            return order
        if tensor.numel() * tensor.element_size() == held.capacity() and held.capacity():
            held.rebind(buffer_view(held, shape, tensor))
            return order
    raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} that is a window on a "
                     "larger storage cannot be spread over chips by itself; spread the whole, or clone() it")


def buffer_view(held: buffer.Buffer, shape: tuple[int, ...], tensor: torch.Tensor) -> Any:
    """The memory as an array of the tensor's own shape."""
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    fresh = buffer.of(copied)
    assert fresh is not None
    if fresh.shape != shape:
        raise ValueError(f"memory of shape {held.shape} cannot be laid out as {shape}")
    return fresh.array()


def spread(tensor: torch.Tensor, spec: Spec, stored: bool = False) -> None:
    """Spreads a tensor's data; every view of its memory sees the same values as before.

    Args:
        tensor: on tpu, all of its storage.
        spec: for each dimension None (every chip has it whole), the name of an axis of the mesh, or several names.
        stored: it is a weight, which is gathered along batch axes where it is used.

    Raises:
        ValueError: an unknown or repeated axis, too many dimensions, a size that the axis does not divide, or a tensor
            that is a part of its storage.
        TypeError: not a tensor on tpu.
    """
    mesh = partition.current
    assert mesh is not None
    held = buffer.of(tensor)
    if held is None:
        raise TypeError(f"a mesh spreads tensors on tpu, got one on {tensor.device}; move it with .to('tpu')")
    check(mesh.axes, tuple(tensor.shape), spec)
    full = (*spec, *(None,) * (tensor.dim() - len(spec)))
    lies = tuple(full[d] for d in _order(tensor, held))
    held.spread(mesh.stored(lies) if stored else mesh.sharding(lies))


def check(axes: dict[str, int], shape: Sequence[int], spec: Spec) -> None:
    """Raises ValueError where the spec does not suit the shape."""
    if len(spec) > len(shape):
        raise ValueError(f"a layout of {len(spec)} dimensions {spec} for a tensor of {len(shape)}, {tuple(shape)}")
    names = [name for part in spec if part is not None for name in ((part,) if isinstance(part, str) else part)]
    for name in names:
        if name not in axes:
            raise ValueError(f"the mesh has no axis {name!r}; its axes are {', '.join(axes)}")
    if len(set(names)) != len(names):
        raise ValueError(f"an axis divides one dimension only, got {spec}")
    for dim, part in enumerate(spec):
        parts = 1
        for name in (part,) if isinstance(part, str) else part or ():
            parts *= axes[name]
        if shape[dim] % parts:
            raise ValueError(f"dimension {dim} of shape {tuple(shape)} cannot be divided into {parts} equal parts "
                             f"(layout {spec}); leave it None, or pad it")


def spec_of(tensor: torch.Tensor) -> Spec | None:
    """How a tensor's data is spread, a name (or names, or None) for each dimension; None where it is not on the mesh
    yet, or lies in another order."""
    mesh = partition.current
    held = buffer.of(tensor)
    order = buffer.dense_order(tensor.shape, tensor.stride())
    if mesh is None or held is None or order is None or tensor.storage_offset():
        return None
    names = partition.spec_of(held.array(), mesh)
    if names is None:
        return None
    lies = regrouped(held.shape, names, tuple(tensor.shape[d] for d in order))
    if lies is None:
        return None
    found: list[Any] = [None] * tensor.dim()
    for place, dim in enumerate(order):
        found[dim] = lies[place]
    return tuple(found)


def regrouped(shape: Sequence[int], names: Spec, wanted: Sequence[int]) -> list[Any] | None:
    """Names of the dimensions of an array, for the same elements in another shape: an array of [6, 8] whose first
    dimension is divided is, as [2, 3, 8], divided in its first. None where the dimensions do not line up."""
    found: list[Any] = [None] * len(wanted)
    here, there = 0, 0
    while here < len(shape) and there < len(wanted):
        first, start = here, there
        have, want = shape[here], wanted[there]
        while have != want:
            if have < want and here + 1 < len(shape):
                here += 1
                have *= shape[here]
            elif want < have and there + 1 < len(wanted):
                there += 1
                want *= wanted[there]
            else:
                return None
        while first < here and shape[first] == 1 and names[first] is None:
            first += 1
        while start < there and wanted[start] == 1:
            start += 1
        if any(name is not None for name in names[first + 1:here + 1]):
            return None
        found[start] = names[first]
        here, there = here + 1, there + 1
    return found if not any(name is not None for name in names[here:]) else None


def batch_sharding(shape: Sequence[int]) -> Any:
    """The sharding that divides an array by its first dimension among the chips of the batch axes; None where there is
    no mesh, or they do not divide it."""
    mesh = partition.current
    if mesh is None or not mesh.batch_axes or not shape or shape[0] % mesh.parts(mesh.batch_axes):
        return None
    return mesh.sharding((mesh.batch_axes if len(mesh.batch_axes) > 1 else mesh.batch_axes[0],))


def batch(tensor: torch.Tensor) -> None:
    """Divides a whole tensor on tpu by its first dimension among the chips of the batch axes, where that works out."""
    mesh = partition.current
    held = buffer.of(tensor)
    if mesh is None or held is None or not tensor.is_contiguous() or held.shape != tuple(tensor.shape):
        return
    sharding = batch_sharding(held.shape)
    if sharding is None:
        return
    if held.written() and partition.spec_of(held.array(), mesh) not in (None, (None,) * tensor.dim()):
        return  # spread already
    held.spread(sharding)


def alike(held: buffer.Buffer, pattern: buffer.Buffer) -> None:
    """Spreads new memory as that it was made like (an optimizer's state lies as its parameter does)."""
    mesh = partition.current
    if mesh is None or pattern.shape != held.shape:
        return
    array = pattern.array()
    if partition.spec_of(array, mesh) is not None:
        held.spread(array.sharding)
