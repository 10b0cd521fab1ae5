"""Collectives inside a compiled graph (`_c10d_functional.*`): lowered into the same executable as everything else."""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..lowering import collective, context
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
        traced: the collectives of the program that was traced last, in order.
        unused: of that program, an element of each result that nothing reads on this rank.
        compared: of each program that ran, what it says to the other ranks.
        last: of the program that is traced, what the last collective gave.
    """

    ranks: tuple[int, ...]
    groups: dict[str, Groups]
    members: dict[str, Any]
    traced: list[str] = field(default_factory=list)
    unused: list[Any] = field(default_factory=list)
    compared: dict[Any, str] = field(default_factory=dict)
    last: list[Any] = field(default_factory=list)

    def of(self, name: str) -> Groups:
        return self.groups[name]

    def in_order(self, values: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """What a collective gives, which starts only after the one before it in the program. XLA:CPU puts collectives
        that do not depend on each other in any order, and where the ranks' programs differ (each takes its own heads)
        in another order on each rank, so that they wait for each other for ever. Chips run one program all together."""
        if context.platform_name() != "cpu":
            return compute(*values)
        result = compute(*(collective.after(value, self.last) for value in values))
        found = result if isinstance(result, list) else [result]
        self.last[:] = [each for each in found if each.size][:1] or self.last
        return result

    def whole(self) -> Any:
        """The process group of all that run the program."""
        found = next((group for group in self.members.values() if group.ranks == self.ranks), None)
        if found is None:
            found = dist.group.WORLD
            assert found is not None
        return found


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
    """The devices that run a program together, which is about to be traced; none for a program of this process."""
    if where is None:
        return []
    where.traced.clear()
    where.unused.clear()
    where.last.clear()
    return program.devices(where.ranks)


@contextmanager
def inner(where: Scope | None) -> Iterator[None]:
    """Around the body of a loop or a branch: its values are not those of the program around it."""
    before = list(where.last) if where is not None else []
    try:
        yield
    finally:
        if where is not None:
            where.last[:] = before


def unused(where: Scope | None) -> list[Any]:
    """What a program must give besides its results: XLA would leave out a collective whose result is not read on this
    rank, and the other ranks, where it is, would wait for ever."""
    return where.unused if where is not None else []


def launch(where: Scope, name: str, run: Callable[[list[Any]], list[Any]], arrays: list[Any]) -> list[Any]:
    """Runs a program with collectives, under the timeout of its group. The ranks compare its collectives (not the rest,
    which may differ on virtual chips) before it runs for the first time.

    Raises:
        DistBackendError: the graph of another rank has other collectives, or a rank does not come or fails.
    """
    group = where.whole()
    number, seconds = group.next_number(), group.timeout.total_seconds()
    doing = where.compared.get(run)
    if doing is None:  # traced by the call before
        doing = where.compared[run] = _summary(where.traced)
    group.compare(number, doing, seconds)
    return watchdog.run(group, number, doing, seconds, lambda: run(arrays))


def _summary(traced: Sequence[str]) -> str:
    """Says which collectives a program has, and by a digest in which order."""
    counts = collections.Counter(traced)
    parts = [each if count == 1 else f"{count} times {each}" for each, count in counts.items()]
    if len(parts) > 8:
        parts[8:] = [f"{len(parts) - 8} more kinds"]
    order = "" if len(counts) == 1 else f"; order {hashlib.sha256(chr(10).join(traced).encode()).hexdigest()[:8]}"
    return f"compiled graph with {', '.join(parts)}{order}"


def lower(node: Node, args: Sequence[Any], where: Scope | None) -> Any:
    """The collective's value."""
    name = str(node.target)
    if waits(name):
        return args[0]
    assert where is not None
    where.traced.append(_text(name, args, where))
    result = where.in_order(args[:1], lambda x: _LOWERED[name](where, x, *args[1:]))
    if not any(user.users for user in node.users):  # a wait_tensor that nobody reads
        where.unused.extend(each.reshape(-1)[:1] for each in (result if isinstance(result, list) else [result]))
    return result


def _text(name: str, args: Sequence[Any], where: Scope) -> str:
    what, x = name.split(".")[1], args[0]
    detail = [str(each) for each in args[1:] if isinstance(each, str | int) and each not in where.members]
    group = next((each for each in reversed(args) if isinstance(each, str)), "")
    some = "" if where.members[group].ranks == where.ranks else f" among {len(where.members[group].ranks)} ranks"
    return f"{' '.join([what, *detail])}({np.dtype(x.dtype).name}[{x.size}]){some}"


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
    groups = where.of(group)
    return collective.broadcast(x, collective.is_replica(groups[0][source]), groups)


_LOWERED: dict[str, Callable[..., Any]] = {
    "_c10d_functional.all_reduce.default": _all_reduce,
    "_c10d_functional.all_gather_into_tensor.default": _all_gather,
    "_c10d_functional.all_gather_single.default": _all_gather,
    "_c10d_functional.reduce_scatter_tensor.default": _reduce_scatter,
    "_c10d_functional.reduce_scatter_single.default": _reduce_scatter,
    "_c10d_functional.all_to_all_single.default": _all_to_all,
    "_c10d_functional.broadcast.default": _broadcast,
}
