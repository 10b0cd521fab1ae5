"""torch.tpu.mesh: the chips of one process as one logical tpu:0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..eager import dispatcher, execute
from ..runtime import partition, processes, transfer
from ..tensor import buffer, placement
from . import plan

_BATCH_AXES = ("dp", "fsdp")


class Mesh:
    """Several chips as one device. Made by torch.tpu.mesh.

    Attributes:
        axes: the name and size of each axis.
    """

    def __init__(self, inner: partition.Mesh) -> None:
        self._inner = inner
        self.axes = dict(inner.axes)

    @property
    def size(self) -> int:
        """How many chips it has."""
        return len(self._inner.chips)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})"

    def layouts(self, model: torch.nn.Module, rules: plan.Rules | None = None) -> list[plan.Layout]:
        """How `shard` would spread the model's parameters and buffers. Moves nothing; parameters may be on meta."""
        return plan.layouts(model, self.axes, rules)

    def shard(self, model: torch.nn.Module, rules: plan.Rules | None = None) -> torch.nn.Module:
        """Spreads a model over the chips, in place: parameters on the CPU go straight to the chips that keep them.

        Without rules a Transformers model is divided along `tp` by its own `tp_plan`, any other by the largest
        dimension of its matrices; along `fsdp` every parameter is divided further. XLA adds the exchange between chips
        that a layout needs, so each gives the same numbers, up to the order of sums.

        Args:
            model: on the CPU or on tpu. Tied parameters stay tied.
            rules: `{"*.q_proj.weight": ("tp", None)}`: patterns of parameter names, and for each dimension None or the
                axis (or axes) that divides it.

        Returns:
            The model, on tpu. With a batch axis (`dp`, `fsdp`) its forward divides the tensors that it is given by
            their first dimension.

        Raises:
            ValueError: a rule does not fit; see torch_tpu.mesh.layouts.
        """
        wanted = {layout.name: layout.spec for layout in self.layouts(model, rules)}
        places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        found: dict[int, tuple[torch.Tensor, str]] = {}
        for module_name, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((module, name))
                    found.setdefault(id(tensor), (tensor, f"{module_name}.{name}" if module_name else name))
        for key, (tensor, full) in found.items():
            self._move(tensor, wanted[full], places[key])
        if self._inner.batch_axes and not any(isinstance(h, _BatchHook) for h in model._forward_pre_hooks.values()):
            model.register_forward_pre_hook(_BatchHook(), with_kwargs=True)
        return model

    def _move(self, tensor: torch.Tensor, spec: partition.Spec, places: list[tuple[torch.nn.Module, str]]) -> None:
        if tensor.device.type == "tpu":
            placement.spread(tensor, spec, stored=True)
            return
        if tensor.device.type == "meta":
            raise ValueError("a parameter on meta has no values to spread; load the model first, or ask "
                             "Mesh.layouts how it would be spread")
        array = transfer.to_device(tensor.detach(), self._inner.stored(spec))
        moved = buffer.wrap(array)
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, moved)
        except RuntimeError as error:  # something holds a weak reference to it (an LSTM does): the modules get another
            if "weakref" not in str(error):
                raise
            for module, name in places:
                setattr(module, name, moved)

    def place(self, tensor: torch.Tensor, *spec: Any) -> torch.Tensor:
        """Spreads one tensor on tpu, in place: `mesh.place(x, "dp", None)`. No names: every chip has it whole.

        Raises:
            ValueError: an axis that the mesh lacks, a size that it does not divide, or a part of a larger storage.
            TypeError: the tensor is not on tpu.
        """
        placement.spread(tensor, spec)
        return tensor

    def layout(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """For each dimension of a tensor None or the axis (or axes) that divides it; None for a tensor that every chip
        gets when it is next used."""
        return placement.spec_of(tensor)

    def batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on tpu, divided by its first dimension among the batch axes (`dp`, `fsdp`), where their chips
        divide it."""
        tensor = tensor.to("tpu")
        placement.batch(tensor)
        return tensor

    def summary(self, model: torch.nn.Module) -> str:
        """A table of how the model's parameters are spread, and the bytes of one chip. To print."""
        rows = [("parameter", "shape", "layout", "MiB a chip")]
        whole = chip = 0
        seen: set[int] = set()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            held = buffer.of(tensor)
            if held is None or id(held) in seen:
                continue
            seen.add(id(held))
            mine = partition.chip_bytes(held.array(), held.nbytes())
            whole, chip = whole + held.nbytes(), chip + mine
            rows.append((name, str(tuple(tensor.shape)), str(self.layout(tensor)), f"{mine / 2**20:.2f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines.append(f"{chip / 2**20:.1f} MiB on each of {self.size} chips, {whole / 2**20:.1f} MiB in all")
        return "\n".join(lines)


class _BatchHook:
    """Divides the arguments of a model's forward; known to what looks for a user's hooks."""

    tpu_mesh = True

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        for value in [*args, *kwargs.values()]:
            if isinstance(value, torch.Tensor) and value.device.type == "tpu":
                placement.batch(value)


_current: Mesh | None = None


def mesh(batch_axes: Sequence[str] = _BATCH_AXES, **axes: int) -> Mesh | None:
    """Makes several chips of this process one device, tpu:0. See torch.tpu.mesh."""
    global _current
    if not axes:
        return _current
    for name, size in axes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"the size of a mesh axis is a positive number of chips, got {name}={size!r}")
    if _current is not None:
        if _current.axes == axes:
            return _current
        raise RuntimeError(f"this process has the mesh {_current} already, and its tensors lie on it; start another "
                           f"process for {', '.join(f'{n}={s}' for n, s in axes.items())}")
    if processes.launched() or torch.distributed.is_initialized():
        raise RuntimeError("torch.tpu.mesh is for one process that drives several chips; this one is a rank of a job, "
                           "which has one chip: use torch.distributed, or start the script without torchrun")
    dispatcher.load()
    from ..runtime import client

    have, count = len(client.get().devices), math.prod(axes.values())
    if count > have:
        hint = f"TORCH_TPU_VIRTUAL_CHIPS={count} gives so many virtual chips" if client.get().platform.virtual else \
            "use a larger slice, or a smaller mesh"
        raise ValueError(f"a mesh of {count} chips, but this process has {have}; {hint}")
    inner = partition.Mesh(axes, [name for name in batch_axes if name in axes])
    execute.clear()
    transfer.clear()
    partition.activate(inner)
    _current = Mesh(inner)
    return _current
