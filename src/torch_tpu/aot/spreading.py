"""How the tensors of a traced program lie on the chips of a slice that is not here: by the rules of torch.tpu.mesh."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..mesh import plan
from ..runtime import partition
from ..tensor import buffer, placement

BATCH_AXES = ("dp", "fsdp")


class Spreading:
    """The layouts of the tensors of one program.

    Args:
        axes: the mesh.
        rules: as for torch_tpu.mesh.Mesh.shard.
    """

    def __init__(self, axes: Mapping[str, int], rules: plan.Rules | None = None) -> None:
        self.mesh = partition.Mesh(dict(axes), [name for name in BATCH_AXES if name in axes], here=False)
        self.rules = rules
        self._shardings: dict[int, Any] = {}
        self._by_shape: dict[tuple[int, ...], Any] = {}
        self._kept: list[buffer.Buffer] = []  # ids stay theirs

    def module(self, module: torch.nn.Module) -> None:
        """Parameters and buffers by the model's own plan, or by size."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for layout in plan.layouts(module, self.mesh.axes, self.rules):
            if layout.name in tensors:
                self.tensor(tensors[layout.name], layout.spec, stored=True)

    def argument(self, tensor: torch.Tensor) -> None:
        """An input of the call, by its first dimension."""
        held = buffer.of(tensor)
        if held is not None and id(held) not in self._shardings:
            sharding = self.by_batch(tuple(tensor.shape))
            if self.mesh.batch_axes and tensor.dim() and sharding is self.mesh.replicated:
                warnings.warn(f"an input of shape {tuple(tensor.shape)} is whole on every chip: its first dimension is "
                              f"no multiple of {' x '.join(f'{n}={self.mesh.axes[n]}' for n in self.mesh.batch_axes)}",
                              RuntimeWarning, stacklevel=2)
            self.put(held, sharding)

    def cache(self, tensor: torch.Tensor) -> None:
        """Keys or values [batch, heads, length, size]: by sequences, and by heads along `tp`."""
        if tensor.dim() != 4:
            return
        batch = self.by_batch(tuple(tensor.shape)).spec
        tp = self.mesh.axes.get("tp", 1)
        self.tensor(tensor, ((*batch, None)[0], "tp" if tp > 1 and tensor.shape[1] % tp == 0 else None))

    def tensor(self, tensor: torch.Tensor, spec: partition.Spec, stored: bool = False) -> None:
        held = buffer.of(tensor)
        assert held is not None
        lies = placement.regrouped(tuple(tensor.shape), (*spec, *(None,) * (tensor.dim() - len(spec))), held.shape)
        sharding = self.mesh.replicated
        if lies is not None:
            sharding = self.mesh.stored(tuple(lies)) if stored else self.mesh.sharding(tuple(lies))
        self.put(held, sharding)
        self._by_shape[held.shape] = None if self._by_shape.get(held.shape, sharding) is not sharding else sharding

    def put(self, held: buffer.Buffer, sharding: Any) -> None:
        self._shardings[id(held)] = sharding
        self._kept.append(held)

    def by_batch(self, shape: tuple[int, ...]) -> Any:
        axes = self.mesh.batch_axes
        if not axes or not shape or shape[0] % self.mesh.parts(axes):
            return self.mesh.replicated
        return self.mesh.sharding((axes if len(axes) > 1 else axes[0],))

    def of(self, held: Any, shape: tuple[int, ...]) -> Any:
        """The sharding of memory; that of a parameter of the same shape for what a step left behind."""
        found = self._shardings.get(id(held)) if held is not None else None
        return found or self._by_shape.get(shape) or self.mesh.replicated

    def chip_bytes(self, sharding: Any, shape: tuple[int, ...], itemsize: int) -> int:
        total = itemsize
        for size, names in zip(shape, (*sharding.spec, *(None,) * len(shape))):
            total *= size // self.mesh.parts(names)
        return total
