"""Bucketing: a graph that Dynamo traced for every size of one dimension runs for a size rounded up, with rows of zeros
behind the real ones, so that few programs serve all sizes.

It is done only where no row of any result depends on another row: `find` goes through the graph node by node, knows a
list of operators for which that is plain, and gives up, with the reason, at the first it does not know.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import lower

Tensor = torch.Tensor
Node = torch.fx.Node


@dataclass(frozen=True)
class Rows:
    """The dimension that varies: where it stands in each input and result (None: nowhere, or the number itself)."""

    inputs: tuple[int | None, ...]
    numbers: tuple[int, ...]  # inputs that are the size itself
    results: dict[Node, int | None]


class Refused(Exception):
    """Why the rows are not independent."""


def find(inputs: Sequence[Node], nodes: Sequence[Node], results: Sequence[Node]) -> Rows | None:
    """The first of the sizes that vary whose rows are independent; None where no size varies.

    Raises:
        Refused: in all of them a row may depend on another.
    """
    symbols = dict.fromkeys(symbol for node in inputs for symbol in _symbols(node.meta.get("val")))
    reasons = []
    for symbol in symbols:
        try:
            return _find(inputs, nodes, results, symbol)
        except Refused as why:
            reasons.append(f"{symbol}: {why}")
    if reasons:
        raise Refused("; ".join(reasons))
    return None


def _find(inputs: Sequence[Node], nodes: Sequence[Node], results: Sequence[Node], symbol: Any) -> Rows:
    for node in nodes:
        _check(node, symbol)
    if any(not isinstance(part, Tensor) for node in results for part in _parts(node)):
        raise Refused("it returns a number")
    if not all(_whole(node, symbol) for node in (*inputs, *results)):
        raise Refused("an input or a result has a multiple of it")
    places = tuple(_at(node, symbol) for node in inputs)
    if all(place is None for place in places):
        raise Refused("no input has this size")
    return Rows(places, tuple(i for i, node in enumerate(inputs) if _counts(node, symbol)),
                {node: _at(node, symbol) for node in results})


def _counts(node: Node, symbol: Any) -> bool:
    """Whether the node is a number computed from the size."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and symbol in value.node.expr.free_symbols


def rounded(size: int, buckets: Sequence[int]) -> int:
    """The next bucket; a power of two where none are given, and the size itself above the largest."""
    if not buckets:
        return 1 << max(size - 1, 0).bit_length()
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else size


def pad(tensor: Tensor, dimension: int, size: int) -> Tensor:
    missing = size - tensor.shape[dimension]
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1 - dimension) + [0, missing])


def cut(tensor: Tensor, dimension: int, size: int) -> Tensor:
    return tensor.narrow(dimension, 0, size).contiguous()


def _symbols(value: Any) -> set[Any]:
    """The free symbols in a number or in the shape of a tensor."""
    sizes = tuple(value.shape) if isinstance(value, Tensor) else (value,)
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def _at(node: Any, symbol: Any) -> int | None:
    """Which dimension of a tensor node holds the rows; None where none does. After a reshape it may be a multiple of
    the size, each row being several that follow each other."""
    value = node.meta.get("val") if isinstance(node, Node) else node
    if not isinstance(value, Tensor):
        return None
    found = [d for d, n in enumerate(value.shape) if isinstance(n, torch.SymInt)
             and symbol in n.node.expr.free_symbols]
    if not found:
        return None
    size: Any = value.shape[found[0]]
    if len(found) > 1 or symbol in (size.node.expr / symbol).free_symbols:
        raise Refused(f"a result has the shape {[str(n) for n in value.shape]}")
    return found[0]


def _whole(node: Node, symbol: Any) -> bool:
    """Whether the rows of an input or result are exactly its dimension."""
    at = _at(node, symbol)
    return at is None or node.meta["val"].shape[at].node.expr == symbol


def _parts(node: Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, list | tuple) else (value,)


def _check(node: Node, symbol: Any) -> None:
    if node.target is operator.getitem:
        return
    parts = _parts(node)
    if not any(isinstance(part, Tensor) for part in parts):
        return  # a size
    given = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
    places = [_at(part, symbol) for part in parts]
    before = {each: _at(each, symbol) for each in given}
    numbers = [each for each in node.all_input_nodes if _counts(each, symbol)]
    if not numbers and all(place is None for place in (*places, *before.values())):
        return
    if lower.is_random(node) or lower.is_mutation(node) or not isinstance(node.target, torch._ops.OpOverload):
        raise Refused(f"{node.target} draws random numbers or writes an input")
    name = str(node.target)
    if name.removeprefix("aten.").split(".")[0] in _FILLED and places[0] is not None and \
            not any(isinstance(each, Node) and _counts(each, symbol) for each in node.args[1:]):
        return
    if torch.Tag.pointwise in node.target.tags and not numbers and _aligned(parts[0], places[0], before):
        return
    rule = _RULES.get(name)
    if numbers and rule not in (_reshaped, _moved):
        raise Refused(f"{name} computes with the size")
    if rule is None or not rule(node, places[0], before):
        raise Refused(f"{name} may mix the rows")


def _aligned(result: Any, place: int | None, before: dict[Node, int | None]) -> bool:
    """Whether the rows of all arguments are those of the result, by broadcasting."""
    return place is not None and all(
        at is None or at - each.meta["val"].dim() == place - result.dim() for each, at in before.items())


def _dims(node: Node, position: int) -> set[int]:
    rank = lower.argument(node, 0).meta["val"].dim()
    given: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim")
    dims = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    return {d % max(rank, 1) for d in dims}


def _over_others(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    at = before.get(lower.argument(node, 0))
    return at is not None and place is not None and at not in _dims(node, 1)


def _left_rows(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    """mm and addmm: rows of the left matrix."""
    *bias, left, right = node.args[:3] if "addmm" in str(node.target) else node.args[:2]
    free = all(before.get(each) is None or (each.meta["val"].dim() == 2 and before[each] == 0)
               for each in bias if isinstance(each, Node))
    return place == 0 and before.get(left) == 0 and before.get(right) is None and free  # type: ignore[arg-type]


def _batches(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    """Every argument with the dimension has it first, and so has the result."""
    return place == 0 and all(at in (0, None) for at in before.values()) and \
        before.get(lower.argument(node, 0)) == 0


def _both_batches(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    return place == 0 and all(at == 0 for at in before.values())


def _reshaped(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    source = lower.argument(node, 0)
    at, old, new = before.get(source), source.meta["val"].shape, node.meta["val"].shape
    return at is not None and place is not None and _product(old[:at]) == _product(new[:place])


def _product(sizes: Sequence[Any]) -> Any:
    return math.prod(n.node.expr if isinstance(n, torch.SymInt) else n for n in sizes)


def _moved(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    return before.get(lower.argument(node, 0)) is not None and place is not None


def _joined(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    rank = node.meta["val"].dim()
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return place is not None and dim % rank != place and all(at == place for at in before.values())


def _normalized(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    source = lower.argument(node, 0)
    at = before.get(source)
    return at is not None and at < source.meta["val"].dim() - len(lower.argument(node, 1)) and \
        sum(each is not None for each in before.values()) == 1


def _looked_up(node: Node, place: int | None, before: dict[Node, int | None]) -> bool:
    return before.get(lower.argument(node, 0)) is None and place == before.get(lower.argument(node, 1))


_FILLED = {"full", "zeros", "ones", "empty", "full_like", "zeros_like", "ones_like", "arange"}
_RULES: dict[str, Any] = {
    **dict.fromkeys(("aten.mm.default", "aten.addmm.default"), _left_rows),
    "aten.bmm.default": _both_batches,
    **dict.fromkeys(("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default",
                     "aten.max.dim", "aten.min.dim", "aten.any.dim", "aten.all.dim", "aten.argmax.default",
                     "aten.argmin.default", "aten._softmax.default", "aten._log_softmax.default",
                     "aten.logsumexp.default", "aten.cumsum.default", "aten.select.int", "aten.slice.Tensor",
                     "aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int"), _over_others),
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"), _reshaped),
    **dict.fromkeys(("aten.transpose.int", "aten.permute.default", "aten.t.default", "aten.unsqueeze.default",
                     "aten.squeeze.dim", "aten.squeeze.dims", "aten.expand.default", "aten.clone.default",
                     "aten._to_copy.default", "aten.detach.default", "aten.alias.default"), _moved),
    "aten.cat.default": _joined,
    "aten.native_layer_norm.default": _normalized,
    "aten.embedding.default": _looked_up,
    **dict.fromkeys(("aten.convolution.default", "aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default",
                     "aten._adaptive_avg_pool2d.default", "aten._native_batch_norm_legit_no_training.default",
                     "tpu.sdpa.default"), _batches),
}
