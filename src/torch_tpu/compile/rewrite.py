"""What a graph says in several nodes and the device does better in one operation, results being equal.

Each rewrite looks at one node and, by way of its arguments, at those before it. It gives the nodes whose values the
better operation takes and a function of those values; the nodes between lose their user, and are not lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..lowering import attention, scatter
from ..lowering.axes import dim_of

Node = torch.fx.Node
aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_COPIES = {aten.clone.default, aten._to_copy.default}


@dataclass(frozen=True)
class Rewrite:
    """`compute` applied to the values of `inputs` is the value of the node."""

    inputs: tuple[Node, ...]
    compute: Callable[..., Any]


def find(node: Node) -> Rewrite | None:
    """The rewrite of a node, or None."""
    rule = _RULES.get(str(node.target)) if node.op == "call_function" else None
    return rule(node) if rule is not None else None


def writes_rows(node: Node) -> bool:
    """Whether the node writes rows of its first argument that follow each other, as static caches do."""
    return node.op == "call_function" and node.target is aten.index_copy.default and _index_copy(node) is not None


def needed(nodes: Sequence[Node], roots: Sequence[Node], keep: Callable[[Node], bool]) -> list[Node]:
    """The nodes, in order, that `roots` depend on once everything is rewritten, and those that must run anyway."""
    inside = set(nodes)
    wanted = {node for node in roots if node in inside}
    order = []
    for node in reversed(nodes):
        if node in wanted or keep(node):
            order.append(node)
            rewrite = find(node)
            wanted.update(rewrite.inputs if rewrite is not None else node.all_input_nodes)
    return order[::-1]


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _shape(node: Any) -> tuple[int, ...] | None:
    """The static shape of a tensor node, else None."""
    value = _value(node)
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return tuple(value.shape)


def _is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _same_dtype(node: Any, source: Any) -> bool:
    a, b = _value(node), _value(source)
    return a is not None and b is not None and a.dtype == b.dtype


# --- grouped-query attention over repeated keys and values

def _before_repeat(node: Any) -> Node | None:
    """The (..., H, L, D) tensor whose heads `node` repeats, each several times in a row, as
    unsqueeze(-3) -> expand -> (clone) -> view does."""
    result = _shape(node)
    if result is None or not _is_call(node, *_VIEWS):
        return None
    inner: Any = node.args[0]
    if _is_call(inner, *_COPIES):
        if not _same_dtype(inner, inner.args[0]):
            return None
        inner = inner.args[0]
    if not _is_call(inner, aten.expand.default) or not _is_call(inner.args[0], aten.unsqueeze.default):
        return None
    wide, single = _shape(inner), _shape(inner.args[0])
    source: Any = inner.args[0].args[0]
    before = _shape(source)
    if wide is None or single is None or before is None or len(before) < 3:
        return None
    lead, (heads, rows, width) = before[:-3], before[-3:]
    fits = (single == (*lead, heads, 1, rows, width) and wide == (*lead, heads, wide[-3], rows, width)
            and result == (*lead, heads * wide[-3], rows, width))
    return source if fits else None


def _attention(node: Node) -> Rewrite | None:
    """Queries of one key/value head go together, so nothing needs to be repeated."""
    query, key, value, *rest = node.args
    few_keys, few_values = _before_repeat(key), _before_repeat(value)
    if few_keys is None or few_values is None or _shape(few_keys)[:-1] != _shape(few_values)[:-1]:  # type: ignore[index]
        return None
    tensors = [arg for arg in rest if isinstance(arg, Node)]

    def compute(q: Any, k: Any, v: Any, *others: Any) -> Any:
        given = iter(others)
        return attention.sdpa(q, k, v, *(next(given) if isinstance(arg, Node) else arg for arg in rest))

    if node.kwargs or not isinstance(query, Node):
        return None
    return Rewrite((query, few_keys, few_values, *tensors), compute)


# --- rows written one after the other

def _first_of_range(node: Any, count: int) -> Any:
    """The node or number s where `node` is [s, s + 1, ..., s + count - 1], else None."""
    if _is_call(node, *_COPIES) and _same_dtype(node, node.args[0]):
        node = node.args[0]
    if _shape(node) != (count,):
        return None
    if _is_call(node, aten.arange.default):
        return 0
    if _is_call(node, aten.arange.start):
        return node.args[0] if isinstance(node.args[0], int) else None
    if not _is_call(node, aten.add.Tensor) or node.kwargs:
        return None
    for base, offset in (node.args, node.args[::-1]):
        if _first_of_range(base, count) == 0 and _is_call(base, aten.arange.default) and \
                (isinstance(offset, int) or _shape(offset) in ((), (1,))):
            return offset
    return None


def _index_copy(node: Node) -> Rewrite | None:
    """Rows that follow each other are written without a scatter."""
    target, dim, index, source = node.args
    assert isinstance(target, Node) and isinstance(source, Node)
    into, rows = _shape(target), _shape(source)
    if not into or rows is None or len(into) != len(rows) or not isinstance(dim, int):
        return None
    dim = dim_of(dim, len(into))
    count = rows[dim]
    if not 0 < count <= into[dim] or rows != (*into[:dim], count, *into[dim + 1:]) or 0 in into:
        return None
    first = _first_of_range(index, count)
    if first is None:
        return None
    if isinstance(first, Node):
        return Rewrite((target, source, first), lambda whole, rows, start: scatter.write_rows(whole, rows, start, dim))
    return Rewrite((target, source), lambda whole, rows: scatter.write_rows(whole, rows, first, dim))


_RULES: dict[str, Callable[[Node], Rewrite | None]] = {
    "tpu.sdpa.default": _attention,
    "aten.index_copy.default": _index_copy,
}
