"""Tensor parallelism of Transformers (tried on 5.24.0 and 5.25.0) where the ranks do not divide the heads of attention.
Transformers would cut through a head and fail.

Key/value heads that do not divide: every rank keeps the key and value projections whole and computes the heads that
its query heads attend to. Query heads that do not divide: whole groups of them are given to the ranks, and ranks with
fewer compute zeros in their place, so all have the same shapes. The query and output projections stay split by rows
and columns as in Transformers, which costs two more collectives a layer: the queries are gathered, and the outputs of
the heads are scattered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from . import on_import

KEY_VALUE, QUERY, OUTPUT = "tpu_kv_heads", "tpu_query_heads", "tpu_output_heads"
_THEIRS = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_EMPTY = -1
TPU = torch.device("tpu")


@dataclass(frozen=True)
class Heads:
    """The heads of one rank.

    Attributes:
        query: the query heads in the order in which the rank has them; -1 where it has zeros.
        kv: the key/value heads; each serves `len(query) // len(kv)` consecutive query heads.
    """

    query: tuple[int, ...]
    kv: tuple[int, ...]

    @property
    def group(self) -> int:
        return len(self.query) // len(self.kv)


def install() -> None:
    on_import.after("transformers.distributed.mixin", _adapt)


def local_heads(query: int, kv: int, ranks: int, rank: int) -> Heads:
    """The heads of a rank; as many query and as many key/value heads on each rank. `kv` divides `query`.

    Where the ranks divide the query heads, those of a rank are consecutive and none is empty.
    """
    share = query // kv
    if query % ranks == 0:
        local = query // ranks
        heads = tuple(range(rank * local, (rank + 1) * local))
        wanted = tuple(head // share for head in heads)
        even = local % share == 0 or share % local == 0
        return Heads(heads, tuple(dict.fromkeys(wanted)) if even else wanted)

    def cells(group: int) -> int:  # a cell is one key/value head with up to `group` of its query heads
        return -(-kv * -(-share // group) // ranks)

    group = min(range(1, share + 1), key=lambda group: ((group + 1) * cells(group), cells(group)))
    whole = [(head, tuple(each if each < share * (head + 1) else _EMPTY for each in range(first, first + group)))
             for head in range(kv) for first in range(share * head, share * (head + 1), group)]
    whole += [(kv - 1, (_EMPTY,) * group)] * (ranks * cells(group) - len(whole))
    mine = whole[rank * cells(group):(rank + 1) * cells(group)]
    return Heads(tuple(head for _, heads in mine for head in heads), tuple(head for head, _ in mine))


def _runs(heads: Sequence[int]) -> list[tuple[int, int]]:
    """(first, number) of each run of consecutive heads; (-1, number) for empty places."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        first, number = runs[-1] if runs else (0, 0)
        if number and head == (_EMPTY if first == _EMPTY else first + number):
            runs[-1] = (first, number + 1)
        else:
            runs.append((head, 1))
    return runs


def take(x: torch.Tensor, heads: Sequence[int], size: int, dim: int) -> torch.Tensor:
    """The slices of `size` elements along a dimension that belong to the heads, zeros for empty places."""
    parts = []
    for first, number in _runs(heads):
        if first == _EMPTY:
            shape = list(x.shape)
            shape[dim] = number * size
            parts.append(x.new_zeros(shape))
        else:
            parts.append(x.narrow(dim, first * size, number * size))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def place(x: torch.Tensor, heads: Sequence[int], total: int, size: int) -> torch.Tensor:
    """The opposite of `take` in the last dimension: heads at their places among `total`, and zeros elsewhere."""
    where = {head: slot for slot, head in enumerate(heads) if head != _EMPTY}
    return take(x, [where.get(head, _EMPTY) for head in range(total)], size, x.dim() - 1)


@dataclass(frozen=True)
class _Attention:
    """An attention layer whose heads the ranks do not divide."""

    query: int
    kv: int
    size: int


def _found(name: str, attention: torch.nn.Module, plan: dict[str, str], ranks: int) -> _Attention | None:
    """The sizes of an attention layer that needs other styles.

    Raises:
        ValueError: its query heads cannot be given to the ranks.
    """
    projections = {part: getattr(attention, part, None) for part in _THEIRS}
    size = getattr(attention, "head_dim", None)
    config: Any = getattr(attention, "config", None)
    query = getattr(config, "num_attention_heads", None)
    if not isinstance(size, int) or not isinstance(query, int) or plan.get(f"{name}.q_proj") != "colwise" \
            or not isinstance(projections["k_proj"], torch.nn.Linear):
        return None
    key, value = projections["k_proj"], projections["v_proj"]
    kv = key.out_features // size
    fits = isinstance(value, torch.nn.Linear) and key.out_features == value.out_features == kv * size and kv \
        and query % kv == 0 and hasattr(attention, "num_key_value_groups")
    planned = all(plan.get(f"{name}.{part}") == style for part, style in _THEIRS.items() if part[0] in "kv")
    if query % ranks == 0:
        return _Attention(query, kv, size) if fits and planned and kv % ranks else None
    rows, columns = projections["q_proj"], projections["o_proj"]
    if fits and planned and plan.get(f"{name}.o_proj") == "rowwise" \
            and isinstance(rows, torch.nn.Linear) and rows.out_features == query * size \
            and isinstance(columns, torch.nn.Linear) and columns.in_features == query * size:
        return _Attention(query, kv, size)
    raise ValueError(f"tp_size={ranks} does not divide the {query} query heads of {name} ({type(attention).__name__}), "
                     "whose projections are not the usual q_proj, k_proj, v_proj and o_proj; choose a tp_size that "
                     "divides them, or leave the attention whole with a tp_plan in DistributedConfig")


def _replan(model: Any, plan: dict[str, str], ranks: int) -> dict[str, str]:
    plan = dict(plan)
    for name, attention in model.named_modules():
        found = _found(name, attention, plan, ranks)
        if found is None:
            continue
        attention.num_key_value_groups = local_heads(found.query, found.kv, ranks, 0).group
        styles = {"k_proj": KEY_VALUE, "v_proj": KEY_VALUE}
        if found.query % ranks:
            styles |= {"q_proj": QUERY, "o_proj": OUTPUT}
        for part, style in styles.items():
            each = f"{name}.{part}"
            model.get_submodule(each)._tpu_attention = found
            for key in [key for key in plan if key == each or key.startswith(each + ".")]:
                plan[key] = style
    return plan


def _of(module: Any, mesh: Any) -> tuple[_Attention, Heads]:
    found = module._tpu_attention
    return found, local_heads(found.query, found.kv, mesh.size(), mesh.get_local_rank())


def _refuse(mixin: Any) -> None:
    """Transformers before 5.23 has no plan of concrete modules to change; it would cut through a head and fail."""
    theirs = mixin.maybe_distribute_model.__func__

    @functools.wraps(theirs)
    def maybe_distribute_model(cls: Any, model: Any, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = getattr(distributed_config, "tp_size", None) or 1
        config = model.config.get_text_config()
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % ranks and torch.accelerator.current_accelerator() == TPU:
                raise ValueError(f"tp_size={ranks} does not divide {name}={heads} of {type(model).__name__}; torch_tpu "
                                 "spreads such heads with Transformers 5.23 or newer: update it, or choose a tp_size "
                                 "that divides them")
        return theirs(cls, model, distributed_config, *args, **kwargs)

    mixin.maybe_distribute_model = classmethod(maybe_distribute_model)


def _adapt(module: ModuleType) -> None:
    if not hasattr(module.DistributedMixin, "_resolve_parallel_plans"):
        return _refuse(module.DistributedMixin)
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from transformers.distributed import tensor_parallel
    from transformers.distributed.parallel_utils import _AllReduceBackward

    class KeyValueHeads(tensor_parallel.TensorParallelLayer):
        """The whole weight on every rank, of which the rank's heads are used; its gradient is summed over the ranks."""

        def install_forward(self, module: Any, mesh: Any) -> Any:
            found, heads = _of(module, mesh)
            group = mesh.get_group()

            def rows(parameter: torch.Tensor) -> torch.Tensor:
                return take(_AllReduceBackward.apply(parameter, group), heads.kv, found.size, 0)

            def forward(x: torch.Tensor) -> torch.Tensor:
                bias = None if module.bias is None else rows(module.bias)
                return torch.nn.functional.linear(_AllReduceBackward.apply(x, group), rows(module.weight), bias)

            module.forward = forward
            return module

    class QueryHeads(tensor_parallel.ColwiseParallel):
        """Split by rows; the queries are gathered, and the rank goes on with its heads."""

        def __init__(self) -> None:
            super().__init__(output_layouts=Replicate(), use_local_output=False)

        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            found, heads = _of(module, mesh)
            whole = super().transform_output_post_forward(module, output, mesh).to_local(grad_placements=[Partial()])
            return take(whole, heads.query, found.size, whole.dim() - 1)

    class OutputHeads(tensor_parallel.RowwiseParallel):
        """Split by columns; what the rank's heads gave is exchanged for the columns that it has."""

        def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
            found, heads = _of(module, mesh)
            x = DTensor.from_local(place(args[0], heads.query, found.query, found.size), mesh, [Partial()],
                                   run_check=False).redistribute(placements=[Shard(-1)])
            return super().transform_inputs_pre_forward(module, (x, *args[1:]), kwargs, mesh)

    styles: dict[str, Any] = {KEY_VALUE: KeyValueHeads(), QUERY: QueryHeads(), OUTPUT: OutputHeads()}
    for name, style in styles.items():
        tensor_parallel.ALL_PARALLEL_STYLES.register(name, style)
    mixin = module.DistributedMixin
    theirs = mixin._resolve_parallel_plans

    @functools.wraps(theirs)
    def _resolve_parallel_plans(self: Any, distributed_config: Any) -> Any:
        tp_plan, ep_plan, fsdp_plan = theirs(self, distributed_config)
        mesh = getattr(self, "_device_mesh", None)
        if distributed_config.tp_size > 1 and mesh is not None and mesh.device_type == "tpu":
            tp_plan = _replan(self, tp_plan, distributed_config.tp_size)
        return tp_plan, ep_plan, fsdp_plan

    mixin._resolve_parallel_plans = _resolve_parallel_plans
