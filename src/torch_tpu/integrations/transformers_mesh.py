"""Transformers on a mesh of chips (torch.tpu.mesh; tried on 5.24.0): a model that is loaded onto the tpu is divided
among the chips, and so is a static cache."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from . import on_import

if TYPE_CHECKING:  # they load JAX, which `import torch` must not
    from ..runtime import partition


def install() -> None:
    on_import.after("transformers.modeling_utils", _adapt_loading)
    on_import.after("transformers.cache_utils", _adapt_caches)


def _adapt_loading(module: ModuleType) -> None:
    theirs = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(theirs)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from ..runtime import partition

        if partition.current is None or not _everything_on_chip(kwargs.get("device_map")):
            return theirs(cls, *args, **kwargs)
        from ..mesh import mesh

        # By way of the host: no chip need hold the whole model, and each gets only its part.
        loaded = theirs(cls, *args, **{**kwargs, "device_map": "cpu"})
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        current = mesh()
        assert current is not None
        current.shard(model)
        model.hf_device_map = {"": "tpu:0"}
        return loaded

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _everything_on_chip(device_map: Any) -> bool:
    if isinstance(device_map, dict):
        return set(device_map) == {""} and _everything_on_chip(device_map[""])
    if isinstance(device_map, int) and not isinstance(device_map, bool):
        return device_map == 0 and not torch.cuda.is_available()
    return str(device_map) in ("tpu", "tpu:0", "auto")


def _adapt_caches(module: ModuleType) -> None:
    theirs = module.StaticLayer.lazy_initialization

    @functools.wraps(theirs)
    def lazy_initialization(self: Any, *args: Any, **kwargs: Any) -> Any:
        from ..runtime import partition

        result = theirs(self, *args, **kwargs)
        if partition.current is not None:
            _divide(self.keys, partition.current)
            _divide(self.values, partition.current)
        return result

    module.StaticLayer.lazy_initialization = lazy_initialization


def _divide(states: torch.Tensor, mesh: partition.Mesh) -> None:
    """A cache of shape [batch, heads, length, head size] by the batch, and by heads along `tp`, where that works out:
    then a chip attends with the heads that it computes."""
    from ..tensor import buffer, placement

    if buffer.of(states) is None:  # it is being traced
        return
    batch = mesh.batch_axes if mesh.batch_axes and states.shape[0] % mesh.parts(mesh.batch_axes) == 0 else None
    heads = "tp" if mesh.axes.get("tp", 1) > 1 and states.shape[1] % mesh.axes["tp"] == 0 else None
    if batch is not None or heads is not None:
        placement.spread(states, (batch, heads))
