"""Collectives inside a compiled graph (`_c10d_functional.*`): lowered into the same executable as everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
_WAITS = ("_c10d_functional.wait_tensor.default", "_c10d_functional._wrap_tensor_autograd.default")
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


def waits(name: str) -> bool:
    """Whether an operator does no more than wait for its argument, as a program's parts do by themselves."""
    return name in _WAITS


def is_collective(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("_c10d_functional.")


def _group(args: Sequence[Any]) -> Any:
    from .group import TpuProcessGroup

    names = [a for a in args if isinstance(a, str)]
    if not names:
        return None
    group = torch._C._distributed_c10d._resolve_process_group(names[-1])  # type: ignore[arg-type]
    return group if isinstance(group, TpuProcessGroup) else None


def supports(node: Node) -> bool:
    """Whether the collective can be part of an executable."""
    name = str(node.target)
    return waits(name) or (_on_device(node) and lowered(name, node.args) is not None)


def lowered(name: str, args: Sequence[Any]) -> tuple[Any, Callable[..., Any]] | None:
    """The process group of a functional collective, and what computes it from the scope and the arguments; None where
    it cannot be part of a program."""
    if name not in _LOWERED:
        return None
    group = _group(args)
    if group is None:
        return None
    if name == "_c10d_functional.all_to_all_single.default" and not all(_equal(args[i]) for i in (1, 2)):
        return None
    if name == "_c10d_functional.all_reduce.default" and args[1] not in _REDUCERS:
        return None
    return group, _LOWERED[name]


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
    return scope_of(group for node in nodes if is_collective(node) and (group := _group(node.args)) is not None)


def scope_of(members: Iterable[Any]) -> Scope | None:
    """Who runs a program with collectives of these process groups; None where there are none.

    Raises:
        NotImplementedError: as above.
    """
    found = {group.group_name: group for group in members}
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
    if waits(name):
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
