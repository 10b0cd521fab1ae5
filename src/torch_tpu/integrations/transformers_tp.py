"""Tensor parallelism of Transformers (tried on 5.24.0) with key/value heads that the number of ranks does not divide:
it would cut through a head and fail. Here every rank keeps the key and value projections whole and uses the heads that
its query heads attend to. Costs the full k_proj and v_proj weights on each rank.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from . import on_import

STYLE = "tpu_kv_heads"


def install() -> None:
    on_import.after("transformers.distributed.mixin", _adapt)


def local_heads(query: int, kv: int, ranks: int, rank: int) -> tuple[list[int], int]:
    """The key/value heads a rank needs, in order, and how many of its query heads share each.

    Where its query heads do not divide evenly among them, every query head gets a copy of its own.
    """
    share, local = query // kv, query // ranks
    first = rank * local
    wanted = [head // share for head in range(first, first + local)]
    if local % share == 0 or share % local == 0:
        unique = list(dict.fromkeys(wanted))
        return unique, local // len(unique)
    return wanted, 1


def _indivisible(attention: torch.nn.Module, ranks: int) -> tuple[int, int, int] | None:
    """(query heads, key/value heads, head size) of an attention layer that needs the style."""
    projections = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    size = getattr(attention, "head_dim", None)
    config: Any = getattr(attention, "config", None)
    query = getattr(config, "num_attention_heads", None)
    if size is None or not isinstance(query, int) or not hasattr(attention, "num_key_value_groups") \
            or not all(isinstance(p, torch.nn.Linear) for p in projections):
        return None
    _, key, value = projections
    assert isinstance(key, torch.nn.Linear) and isinstance(value, torch.nn.Linear)
    kv = key.out_features // size
    fits = key.out_features == value.out_features == kv * size and kv and query % kv == 0
    return (query, kv, size) if fits and kv % ranks and query % ranks == 0 else None


def _replan(model: Any, plan: dict[str, str], ranks: int) -> dict[str, str]:
    plan = dict(plan)
    for name, attention in model.named_modules():
        found = _indivisible(attention, ranks)
        names = [f"{name}.{part}" for part in ("k_proj", "v_proj")]
        if found is None or any(plan.get(each) != "colwise" for each in names):
            continue
        attention.num_key_value_groups = local_heads(found[0], found[1], ranks, 0)[1]
        for each in names:
            model.get_submodule(each)._tpu_heads = found
            for key in [key for key in plan if key == each or key.startswith(each + ".")]:
                plan[key] = STYLE
    return plan


def _adapt(module: ModuleType) -> None:
    from transformers.distributed import tensor_parallel
    from transformers.distributed.parallel_utils import _AllReduceBackward

    class KeyValueHeads(tensor_parallel.ReplicatedWithGradAllReduce):
        """The whole weight on every rank, of which the rank's heads are used; its gradient is summed over the ranks."""

        def install_forward(self, module: Any, mesh: Any) -> Any:
            query, kv, size = module._tpu_heads
            heads, _ = local_heads(query, kv, mesh.size(), mesh.get_local_rank())
            consecutive = heads == list(range(heads[0], heads[0] + len(heads)))

            def rows(weight: torch.Tensor) -> torch.Tensor:
                if consecutive:
                    return weight[heads[0] * size:(heads[-1] + 1) * size]
                return torch.cat([weight[head * size:(head + 1) * size] for head in heads])

            def forward(x: torch.Tensor) -> torch.Tensor:
                x = _AllReduceBackward.apply(x, mesh.get_group())
                bias = None if module.bias is None else rows(module.bias)
                return torch.nn.functional.linear(x, rows(module.weight), bias)

            module.forward = forward
            return super().install_forward(module, mesh)

    style: Any = KeyValueHeads()
    tensor_parallel.ALL_PARALLEL_STYLES.register(STYLE, style)
    mixin = module.DistributedMixin
    theirs = mixin._resolve_parallel_plans

    @functools.wraps(theirs)
    def _resolve_parallel_plans(self: Any, distributed_config: Any) -> Any:
        tp_plan, ep_plan, fsdp_plan = theirs(self, distributed_config)
        mesh = getattr(self, "_device_mesh", None)
        if distributed_config.tp_size > 1 and not fsdp_plan and mesh is not None and mesh.device_type == "tpu":
            tp_plan = _replan(self, tp_plan, distributed_config.tp_size)
        return tp_plan, ep_plan, fsdp_plan

    mixin._resolve_parallel_plans = _resolve_parallel_plans
