"""torch.compile takes `dist.all_reduce`, `all_gather` and a few others into its graph, by a table of functions that it
traces instead (torch 2.13). The functions here complete it for tpu tensors: broadcast, reduce, gather, scatter, and
all_to_all and reduce_scatter of lists. On other devices these break the graph, as they always did.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from . import on_import

Tensor = torch.Tensor


def _for_tpu(tensor: Tensor, name: str) -> None:
    if tensor.device.type != "tpu":
        torch._dynamo.graph_break(msg=f"torch.distributed.{name} is traced for tpu tensors only")


def _place(group: Any, rank: int | None, group_rank: int | None) -> int:
    """A rank's number in the group."""
    if group_rank is not None:
        return group_rank
    return dist.get_process_group_ranks(group).index(rank or 0)


def _torch_tpu_broadcast(tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False,
                         group_src: int | None = None) -> None:
    from torch.distributed import _functional_collectives as fc

    _for_tpu(tensor, "broadcast")
    group = group or dist.group.WORLD
    tensor.copy_(fc.broadcast(tensor, _place(group, src, group_src), group))


def _torch_tpu_reduce(tensor: Tensor, dst: int | None = None, op: Any = dist.ReduceOp.SUM, group: Any = None,
                      async_op: bool = False, group_dst: int | None = None) -> None:
    from torch.distributed import _functional_collectives as fc

    _for_tpu(tensor, "reduce")
    group = group or dist.group.WORLD
    total = fc.all_reduce(tensor, fc.REDUCE_OP_TO_STR[op], group)
    if dist.get_rank(group) == _place(group, dst, group_dst):
        tensor.copy_(total)


def _torch_tpu_gather(tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int | None = None,
                      group: Any = None, async_op: bool = False, group_dst: int | None = None) -> None:
    from torch.distributed import _functional_collectives as fc

    _for_tpu(tensor, "gather")
    group = group or dist.group.WORLD
    everyone = fc.all_gather_tensor(tensor.unsqueeze(0), 0, group)
    if gather_list is not None and dist.get_rank(group) == _place(group, dst, group_dst):
        for number, taken in enumerate(gather_list):
            taken.copy_(everyone[number])


def _torch_tpu_scatter(tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int | None = None,
                       group: Any = None, async_op: bool = False, group_src: int | None = None) -> None:
    from torch.distributed import _functional_collectives as fc

    _for_tpu(tensor, "scatter")
    group = group or dist.group.WORLD
    if scatter_list:
        rows = torch.stack(scatter_list)
    else:
        rows = tensor.new_zeros((dist.get_world_size(group), *tensor.shape))
    taken = fc.all_to_all_single(rows, None, None, group)
    tensor.copy_(taken[_place(group, src, group_src)])


def _torch_tpu_reduce_scatter(output: Tensor, input_list: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None,
                              async_op: bool = False) -> None:
    from torch.distributed import _functional_collectives as fc

    _for_tpu(output, "reduce_scatter")
    if any(part.shape != output.shape for part in input_list):
        torch._dynamo.graph_break(msg="torch.distributed.reduce_scatter of different sizes is not traced")
    group = group or dist.group.WORLD
    rows = torch.stack(input_list)
    output.copy_(fc.reduce_scatter_tensor(rows, fc.REDUCE_OP_TO_STR[op], 0, group)[0])


def _torch_tpu_all_to_all(output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Any = None,
                          async_op: bool = False) -> None:
    from torch.distributed import _functional_collectives as fc

    _for_tpu(input_tensor_list[0], "all_to_all")
    shape = input_tensor_list[0].shape
    if any(part.shape != shape for part in (*input_tensor_list, *output_tensor_list)):
        torch._dynamo.graph_break(msg="torch.distributed.all_to_all of different sizes is not traced")
    group = group or dist.group.WORLD
    everyone = fc.all_to_all_single(torch.stack(input_tensor_list), None, None, group)
    for number, taken in enumerate(output_tensor_list):
        taken.copy_(everyone[number])


_TRACED = {"broadcast": _torch_tpu_broadcast, "reduce": _torch_tpu_reduce, "gather": _torch_tpu_gather,
           "scatter": _torch_tpu_scatter, "reduce_scatter": _torch_tpu_reduce_scatter,
           "all_to_all": _torch_tpu_all_to_all}


def adapt(functional: ModuleType) -> None:
    table: dict[Any, Any] = functional.traceable_collective_remaps
    for name, traced in _TRACED.items():
        theirs = getattr(dist, name)
        if theirs not in table:  # a later torch may have its own
            table[theirs] = traced
            setattr(functional, traced.__name__, traced)  # Dynamo names the function by this module


def install() -> None:
    if dist.is_available():
        on_import.after("torch.distributed._functional_collectives", adapt)
