"""DTensor (torch 2.13): attention, and random numbers.

The device has attention as one operator of its own, for which DTensor needs to know the ways in which it can be
divided: by batch, and by heads.

DTensor's random operators move the offset in the state of CUDA's generator. This device's generator has none: here the
ranks draw a seed, which is the same on all of them, and each shard's numbers come from that seed and its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from . import on_import

Placements = list[Any]


def install() -> None:
    on_import.after("torch.distributed.tensor._random", _adapt_random)
    on_import.after("torch_tpu.eager.attention", lambda _: on_import.after("torch.distributed.tensor", _register))


def _register(module: ModuleType) -> None:
    from torch.distributed.tensor.experimental._register_sharding import register_sharding

    register_sharding(torch.ops.tpu.sdpa.default)(_forward)
    register_sharding(torch.ops.tpu.sdpa_backward.default)(_backward)


def _dims(query: Any, key: Any) -> list[int]:
    """The dimensions by which attention can be divided without communication: all but the last two, and the heads
    only where no rank would need a part of a group."""
    heads = query.ndim - 3
    size = query.mesh.size()
    return [dim for dim in range(query.ndim - 2)
            if dim != heads or query.shape[dim] == key.shape[dim] or key.shape[dim] % size == 0]


def _of_mask(mask: Any, dim: int, query: Any) -> Any:
    """Where a mask, which is broadcast to the queries' dimensions, is divided when the queries are at `dim`."""
    from torch.distributed.tensor import Replicate, Shard

    if mask is None:
        return None
    own = dim - (query.ndim - mask.ndim)
    return Shard(own) if own >= 0 and mask.shape[own] > 1 else Replicate()


def _forward(query: Any, key: Any, value: Any, attn_mask: Any, keep: Any, dropout_p: float, is_causal: bool,
             scale: float) -> list[tuple[Placements, Placements]]:
    from torch.distributed.tensor import Replicate, Shard

    def row(place: Any, masks: tuple[Any, Any]) -> tuple[Placements, Placements]:
        return [place] * 2, [place] * 3 + [*masks, None, None, None]

    whole = (None if attn_mask is None else Replicate(), None if keep is None else Replicate())
    return [row(Replicate(), whole), *(row(Shard(dim), (_of_mask(attn_mask, dim, query), _of_mask(keep, dim, query)))
                                       for dim in _dims(query, key))]


def _backward(grad: Any, query: Any, key: Any, value: Any, output: Any, logsumexp: Any, attn_mask: Any, keep: Any,
              dropout_p: float, is_causal: bool, scale: float, grad_mask: bool) -> list[tuple[Placements, Placements]]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    def row(place: Any, masks: tuple[Any, Any], of_mask: Any) -> tuple[Placements, Placements]:
        return [place] * 3 + [of_mask], [place] * 6 + [*masks, None, None, None, None]

    whole = (None if attn_mask is None else Replicate(), None if keep is None else Replicate())
    rows = [row(Replicate(), whole, Replicate())]
    for dim in _dims(query, key):
        mask = _of_mask(attn_mask, dim, query)
        total = Partial() if grad_mask and mask == Replicate() else mask if grad_mask else Replicate()
        rows.append(row(Shard(dim), (mask, _of_mask(keep, dim, query)), total))
    return rows


def _adapt_random(module: ModuleType) -> None:
    theirs: Any = module.OffsetBasedRNGTracker

    class Tracker(theirs):
        """What runs random operators on shards; of tpu meshes in the way of this module."""

        def __init__(self, device_mesh: Any, run_state_sync: bool = True) -> None:
            super().__init__(device_mesh, run_state_sync and device_mesh.device_type != "tpu")
            if run_state_sync and device_mesh.device_type == "tpu":
                state = torch.tpu.get_rng_state()  # type: ignore[attr-defined]
                torch.distributed.broadcast(state, 0)
                torch.tpu.set_rng_state(state)  # type: ignore[attr-defined]

        @contextmanager
        def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
            if self._device.type != "tpu" or not self.distribute_region_enabled:
                with super()._distribute_region(spec, generator):
                    yield
                return
            from ..eager import random
            from ..tensor import generator as generators

            source: Any = generator if generator is not None else generators.default()
            high, low = (int(word) for word in random.draw(generator)[0])
            after = source.get_state()
            mesh = spec.mesh
            shards = module._calc_shard_info([mesh._sym_get_coordinate(dim) for dim in range(mesh.ndim)], spec)
            source.manual_seed(((high << 32 | low) + module._calc_shard_linear_idx(*shards)) % (1 << 63))
            try:
                yield
            finally:
                source.set_state(after)

    vars(module)["OffsetBasedRNGTracker"] = Tracker
