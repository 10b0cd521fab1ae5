"""Collectives inside a compiled graph (`_c10d_functional.*`): lowered into the same executable as everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist

from ..lowering import collective
from ..lowering.collective import Groups
from . import program, watchdog

Node = torch.fx.Node
_REDUCERS = {"sum": "sum", "avg": "avg", "product": "prod", "min": "min", "max": "max", "band": "band", "bor": "bor",
             "bxor": "bxor"}


@dataclass(frozen=True)
class Scope:
    """The processes that run a program together, and each group's place among them.

    Attributes:
        ranks: of the job, in the order of the program's replicas.
        groups: by name of the process group.
        members: by name, the process group.
    """

    ranks: tuple[int, ...]
    groups: dict[str, Groups]
    members: dict[str, Any]

    def of(self, name: str) -> Groups:
        return self.groups[name]


def is_collective(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("_c10d_functional.")


def _group(node: Node) -> Any:
    from .group import TpuProcessGroup

    names = [a for a in node.args if isinstance(a, str)]
    if not names:
        return None
    group = torch._C._distributed_c10d._resolve_process_group(names[-1])  # type: ignore[arg-type]
    return group if isinstance(group, TpuProcessGroup) else None


def supports(node: Node) -> bool:
    """Whether the collective can be part of an executable."""
    name = str(node.target)
    if name == "_c10d_functional.wait_tensor.default":
        return True
    if name not in _LOWERED or not _on_device(node):
        return False
    group = _group(node)
    if group is None:
        return False
    if name == "_c10d_functional.all_to_all_single.default":
        return all(_equal(node.args[i]) for i in (1, 2))
    return name != "_c10d_functional.all_reduce.default" or node.args[1] in _REDUCERS


def _equal(splits: Any) -> bool:
    return all(isinstance(s, int) for s in splits) and len(set(splits)) == 1


def _on_device(node: Node) -> bool:
    value = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"


def scope(nodes: Sequence[Node]) -> Scope | None:
    """Who runs a program with these nodes; None where they hold no collective.

    Raises:
        NotImplementedError: groups of a size that does not divide the rest of the job.
    """
    found = {group.group_name: group for node in nodes if is_collective(node) and (group := _group(node)) is not None}
    if not found:
        return None
    kinds = {group.ranks for group in found.values()}
    ranks = kinds.pop() if len(kinds) == 1 else tuple(range(dist.get_world_size()))
    groups = {}
    for name, group in found.items():
        around = collective.groups_around([ranks.index(rank) for rank in group.ranks], len(ranks))
        if around is None:
            raise NotImplementedError(
                f"a compiled graph with collectives of several groups, one of which has {len(group.ranks)} of "
                f"{len(ranks)} ranks; use groups whose size divides the job's, or compile the parts separately")
        groups[name] = around
    return Scope(ranks, groups, found)


def replicas(where: Scope | None) -> list[Any]:
    """The devices that run a program together; none for a program of this process alone."""
    return program.devices(where.ranks) if where is not None else []


def launch(where: Scope, name: str, run: Callable[[list[Any]], list[Any]], arrays: list[Any]) -> list[Any]:
    """Runs a program with collectives, under the timeout of its groups."""
    group = next(iter(where.members.values()))
    return watchdog.run(group, group.next_number(), f"compiled graph {name}", group.timeout.total_seconds(),
                        lambda: run(arrays))


def lower(node: Node, args: Sequence[Any], where: Scope | None) -> Any:
    """The collective's value."""
    name = str(node.target)
    if name == "_c10d_functional.wait_tensor.default":
        return args[0]
    assert where is not None
    return _LOWERED[name](where, *args)


def _all_reduce(where: Scope, x: Any, op: str, group: str) -> Any:
    return collective.all_reduce(x, _REDUCERS[op], where.of(group))


def _all_gather(where: Scope, x: Any, size: int, group: str) -> Any:
    shape = (x.shape[0] * size, *x.shape[1:]) if x.ndim else (size,)
    return collective.all_gather(x.reshape(-1), where.of(group)).reshape(shape)


def _reduce_scatter(where: Scope, x: Any, op: str, size: int, group: str) -> Any:
    shape = (x.shape[0] // size, *x.shape[1:])
    return collective.reduce_scatter(x.reshape(size, math.prod(shape)), _REDUCERS[op], where.of(group)).reshape(shape)


def _all_to_all(where: Scope, x: Any, outputs: Any, inputs: Any, group: str) -> Any:
    size = len(where.of(group)[0])
    return collective.all_to_all(x.reshape(size, x.size // size), where.of(group)).reshape(x.shape)


def _broadcast(where: Scope, x: Any, source: int, group: str) -> Any:
    mine = where.members[group].rank() == source
    return collective.broadcast(x, jnp.asarray(mine, np.bool_), where.of(group))


_LOWERED: dict[str, Callable[..., Any]] = {
    "_c10d_functional.all_reduce.default": _all_reduce,
    "_c10d_functional.all_gather_into_tensor.default": _all_gather,
    "_c10d_functional.all_gather_single.default": _all_gather,
    "_c10d_functional.reduce_scatter_tensor.default": _reduce_scatter,
    "_c10d_functional.reduce_scatter_single.default": _reduce_scatter,
    "_c10d_functional.all_to_all_single.default": _all_to_all,
    "_c10d_functional.broadcast.default": _broadcast,
}
