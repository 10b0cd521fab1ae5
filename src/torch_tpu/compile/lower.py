"""Interprets FX nodes with JAX values, through the lowering table."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from ..distributed import graph as collectives
from ..lowering import promotion, strided, table
from ..runtime import dtypes
from ..tensor import buffer
from . import control_flow, rewrite

Node = torch.fx.Node
aten = torch.ops.aten

_SYMBOLIC = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.pow,
             operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
             operator.and_, operator.or_, operator.not_, math.ceil, math.floor, math.trunc, min, max,
             torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_int, torch.sym_float, torch.sym_ite}
_SIZES: dict[str, Any] = {"aten.sym_size.int": lambda x, d: x.shape[d],
                          "aten.sym_numel.default": lambda x: math.prod(x.shape)}
_CHECKS = {"aten._assert_scalar.default", "aten._assert_async.msg", "aten._assert_tensor_metadata.default",
           "aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"}
# Checks whose result is one of their arguments: which.
_PASSING = {"aten._functional_assert_async.msg": 2, "aten._functional_assert_scalar.default": 2}
# A random operator whose forward pass keeps the state it drew from, for the backward pass to draw the same again
# (activation checkpointing). Here that state is the operator's key.
_SAVING, _REPEATING = torch.ops.higher_order.run_and_save_rng_state, torch.ops.higher_order.run_with_rng_state
# Operators with an effect and no result, which the host may run after the whole graph.
_CHECKED_LATER = {aten._linalg_check_errors.default}


def argument(node: Node, position: int) -> Any:
    """A node's positional argument."""
    return node.args[position]


def name_of(node: Node) -> str:
    return str(node.target)


def is_mutation(node: Node) -> bool:
    """The epilogue that writes a new value into an input."""
    return node.op == "call_function" and node.target is aten.copy_.default


def is_random(node: Node) -> bool:
    """Whether the node draws a key."""
    if node.target is _SAVING:
        return True
    entry = table.find(name_of(node)) if node.op == "call_function" else None
    return entry is not None and entry.random


def is_random_state(node: Node) -> bool:
    """Whether the node is the state that a random operator kept: bytes of its key, on the device (the graph expects a
    generator's state, on the CPU)."""
    return node.target is operator.getitem and argument(node, 0).target is _SAVING and argument(node, 1) == 0


def _is_integer_product(node: Node) -> bool:
    """out_dtype(mm, int32, a, b): a product of int8 matrices, as torchao writes it."""
    return node.target is torch.ops.higher_order.out_dtype and argument(node, 0) is aten.mm.default \
        and argument(node, 1) is torch.int32


def supports(node: Node) -> bool:
    """Whether the node can be part of an executable."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or node.target in _SYMBOLIC or _is_integer_product(node):
        return True
    if control_flow.is_control_flow(node):
        return control_flow.supports(node)
    if collectives.is_collective(node):
        return collectives.supports(node)
    if node.target is _SAVING or node.target is _REPEATING:
        return table.find(str(argument(node, 0 if node.target is _SAVING else 1))) is not None
    name = name_of(node)
    return table.find(name) is not None or name in _SIZES or name in _CHECKS or name in _PASSING or \
        (is_mutation(node) and argument(node, 0).op == "placeholder")


def is_late_check(node: Node) -> bool:
    """Whether the node reads a result on the host and raises an error, which can wait for the end of the graph."""
    return node.target is torch.ops.higher_order.with_effects and argument(node, 1) in _CHECKED_LATER


def check(node: Node, environment: dict[Node, Any]) -> None:
    """Runs such a check (its arguments: an effect token, the operator, the operator's own)."""
    args, kwargs = torch.fx.node.map_arg((node.args[2:], node.kwargs), lambda n: environment[n])
    target: Any = argument(node, 1)
    target(*args, **kwargs)


def constant(value: Any) -> Any:
    """A tensor that a graph holds as an attribute, in a program."""
    held = buffer.of(value)
    if held is None:
        return jnp.asarray(value.detach().numpy())
    return strided.read(held.array(), strided.of(value), dtypes.to_numpy(value.dtype))


def leaves(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(value, found.append)
    return found


def view_chain(node: Node) -> tuple[Node, list[Node]]:
    """The node whose memory `node` is a window on, and the view operators between them (none: it has its own)."""
    chain: list[Node] = []
    at: Any = node
    while at.op == "call_function":
        source = at.args[0] if at.args else None
        if at.target is operator.getitem:
            if not _returns_views(source):
                break
        elif not ((_returns_views(at) and not _is_list(at)) or (chain and chain[-1].target is operator.getitem
                  and chain[-1].args[0] is at)):
            break
        if not isinstance(source, Node):
            break
        chain.append(at)
        at = source
    return at, chain[::-1]


def _returns(node: Any) -> Any:
    schema = getattr(node.target, "_schema", None)
    return schema.returns[0] if schema is not None and len(schema.returns) == 1 else None


def _returns_views(node: Any) -> bool:
    returned = _returns(node)
    alias = returned.alias_info if returned is not None else None
    return alias is not None and not alias.is_write


def _is_list(node: Any) -> bool:
    returned = _returns(node)
    return returned is not None and "List" in str(returned.type)


def mutation_of(node: Node) -> Node:
    """The input that a mutation writes."""
    return argument(node, 0)


def run_eagerly(node: Node, environment: dict[Node, Any]) -> Any:
    """Runs a node that has no lowering, with torch tensors."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: environment[n])
    target: Any = node.target
    return target(*args, **kwargs)


def _runs_anyway(node: Node) -> bool:
    """Whether leaving the node out would be noticed though nobody uses its result."""
    return is_mutation(node) or is_random(node) or collectives.is_collective(node)


class Run:
    """One pass over the nodes of a segment."""

    def __init__(self, environment: dict[Node, Any], keys: Any, scope: collectives.Scope | None = None) -> None:
        self.environment = environment
        self.keys = keys
        self.scope = scope
        self.drawn = 0
        self.mutations: dict[Node, Any] = {}

    def nodes(self, nodes: list[Node], roots: Sequence[Node]) -> None:
        """Runs what `roots` and the mutations need."""
        for node in rewrite.needed(nodes, roots, _runs_anyway):
            try:
                self.environment[node] = self._node(node)
            except (TypeError, ValueError, IndexError, NotImplementedError) as error:
                raise RuntimeError(f"lowering {node.format_node()} failed: {type(error).__name__}: {error}") from error

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self.environment[argument]
        if isinstance(argument, list | tuple):
            return [self._value(item) for item in argument]
        if isinstance(argument, torch.dtype):
            return dtypes.to_numpy(argument)
        return argument

    def _node(self, node: Node) -> Any:
        target: Any = node.target
        better = rewrite.find(node)
        if better is not None:
            return _typed(better.compute(*(self.environment[n] for n in better.inputs)), node.meta.get("val"))
        if target is operator.getitem:
            return self.environment[argument(node, 0)][argument(node, 1)]
        if control_flow.is_control_flow(node):
            return _typed(control_flow.lower_node(node, self._value, self.scope), node.meta.get("val"))
        args = [self._value(a) for a in node.args]
        if _is_integer_product(node):
            return _call(aten._int_mm.default, args[2:], {}, None)
        if target in _SYMBOLIC:
            symbolic: Any = target
            return symbolic(*args)
        if collectives.is_collective(node):
            return _typed(collectives.lower(node, args, self.scope), node.meta.get("val"))
        name = name_of(node)
        if name in _SIZES:
            return _SIZES[name](*args)
        if name in _CHECKS:
            return None
        if name in _PASSING:
            return args[_PASSING[name]]
        if is_mutation(node):
            self.mutations[argument(node, 0)] = self.environment[argument(node, 0)] = args[1]
            return args[1]
        if name == "aten.as_strided.default":
            return self._as_strided(node, args)
        kwargs = {k: self._value(v) for k, v in node.kwargs.items() if k not in table.PLACEMENT}
        if target is _SAVING:
            key = self._key()
            meta = node.meta.get("val")
            state = lax.bitcast_convert_type(key, jnp.uint8).reshape(-1)
            return [state, _typed(_call(args[0], args[1:], kwargs, key), meta and meta[1])]
        if target is _REPEATING:
            key = lax.bitcast_convert_type(args[0].reshape(2, 4), jnp.uint32)
            return _typed(_call(args[1], args[2:], kwargs, key), node.meta.get("val"))
        return _typed(_call(target, args, kwargs, self._key() if is_random(node) else None), node.meta.get("val"))

    def _key(self) -> Any:
        self.drawn += 1
        return self.keys[self.drawn - 1]

    def _as_strided(self, node: Node, args: list[Any]) -> Any:
        """Strides are meant in the memory of the argument, which here is known only for dense tensors."""
        source = argument(node, 0).meta["val"]
        size, stride = tuple(args[1]), tuple(args[2])
        offset: Any = args[3] if len(args) > 3 and args[3] is not None else node.kwargs.get("storage_offset")
        order = buffer.dense_order(args[0].shape, tuple(int(s) for s in source.stride()))
        if order is None:
            raise NotImplementedError("as_strided of a tensor with gaps in memory")
        start = int(source.storage_offset()) if offset is None else int(offset)
        view = strided.View(size, stride, start - int(source.storage_offset()))
        return strided.read(args[0].transpose(order), view, args[0].dtype)


def _call(op: Any, args: list[Any], kwargs: dict[str, Any], key: Any) -> Any:
    """An operator's lowering on JAX values."""
    entry = table.find(str(op))
    assert entry is not None
    args = [a for a, s in zip(args, op._schema.arguments) if s.name not in table.PLACEMENT]
    if entry.random:
        kwargs = {**kwargs, "key": key}
    return entry.fn(*args, **kwargs)


def _typed(result: Any, meta: Any) -> Any:
    """Results in the dtype the graph says."""
    if isinstance(result, list | tuple):
        metas = meta if isinstance(meta, list | tuple) else [None] * len(result)
        return [_typed(r, m) for r, m in zip(result, metas)]
    if isinstance(meta, torch.Tensor) and result is not None:
        return promotion.cast(result, meta.dtype)
    return result
