"""Control flow in a graph as XLA's: torch.cond, while_loop, scan and map are part of the program, and choose on the
device.

Their branches and bodies are graphs of their own, reached by `get_attr` nodes, and go through the same lowerings
(lower.Run). What cannot be compiled (a body with an operator that the table lacks, with random numbers, or with Python
numbers as loop variables) runs eagerly between two programs, as any such node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from jax import lax

from ..distributed import graph as collectives
from ..lowering import promotion
from . import flex_attention, lower

Node = torch.fx.Node
Body = Callable[..., tuple[Any, ...]]
_hops = torch.ops.higher_order

_OPERATORS = {_hops.cond: (1, 2), _hops.while_loop: (0, 1), _hops.scan: (0,), _hops.map_impl: (0,),
              **flex_attention.GRAPHS}


def is_control_flow(node: Node) -> bool:
    return node.op == "call_function" and node.target in _OPERATORS


def graph_of(node: Any) -> torch.fx.GraphModule | None:
    """The graph that a `get_attr` node stands for."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value if isinstance(value, torch.fx.GraphModule) else None


def graphs(node: Node) -> list[torch.fx.GraphModule]:
    """The graphs that a control flow node runs."""
    if node.target in flex_attention.GRAPHS:
        found = [graph_of(each) for each in flex_attention.graph_nodes(node)]
    else:
        found = [graph_of(lower.argument(node, position)) for position in _OPERATORS[node.target]]
    return [each for each in found if each is not None]


def supports(node: Node) -> bool:
    """Whether it can be part of an executable."""
    inner = graphs(node)
    if len(inner) < (1 if node.target in flex_attention.GRAPHS else len(_OPERATORS[node.target])):
        return node.target in flex_attention.GRAPHS  # without score_mod and mask_mod there is nothing to run
    loops = node.target is _hops.while_loop or node.target is _hops.scan
    if loops and any(not isinstance(_meta(each), torch.Tensor) for each in lower.argument(node, len(inner))):
        return False  # a Python number that changes from turn to turn
    return all(_compiles(each) for gm in inner for each in gm.graph.nodes)


def _meta(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, Node) else value


def _compiles(node: Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    return lower.supports(node) and not lower.is_random(node) and not lower.is_mutation(node)


def body(gm: torch.fx.GraphModule, scope: Any) -> Body:
    """A graph as a function of JAX values and Python numbers, giving a tuple."""
    nodes = list(gm.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    inner = [node for node in nodes if node.op == "call_function"]
    constants = [node for node in nodes if node.op == "get_attr" and graph_of(node) is None]
    result: Any = nodes[-1].args[0]

    def run(*values: Any) -> tuple[Any, ...]:
        environment = dict(zip(inputs, values))
        for node in constants:
            environment[node] = lower.constant(getattr(gm, str(node.target)))
        with collectives.inner(scope):
            lower.Run(environment, None, scope).nodes(inner, lower.leaves(result))
        found = torch.fx.node.map_arg(result, lambda node: environment[node])
        return tuple(found) if isinstance(found, list | tuple) else (found,)

    return run


def lower_node(node: Node, value: Callable[[Any], Any], scope: Any) -> Any:
    """The results of a control flow node; `value` gives the JAX value of an argument."""
    if node.target in flex_attention.GRAPHS:
        return flex_attention.lower_node(node, value, lambda each: _body_of(each, scope))
    metas = node.meta["val"]
    bodies = [_body_of(lower.argument(node, position), scope) for position in _OPERATORS[node.target]]
    args = [value(each) if graph_of(each) is None else None for each in node.args]
    if node.target is _hops.cond:
        return _cond(args[0], bodies[0], bodies[1], args[3], metas)
    if node.target is _hops.while_loop:
        return _while(bodies[0], bodies[1], args[2], args[3], metas)
    if node.target is _hops.scan:
        return _scan(bodies[0], args[1], args[2], args[3], metas)
    return _map(bodies[0], args[1], args[2])


def _body_of(node: Any, scope: Any) -> Body:
    gm = graph_of(node)
    assert gm is not None
    return body(gm, scope)


def _typed(values: Any, metas: Any) -> list[Any]:
    return [promotion.cast(value, meta.dtype) if isinstance(meta, torch.Tensor) else value
            for value, meta in zip(values, metas)]


def _arrays(values: Any) -> tuple[list[Any], Callable[[Any], list[Any]]]:
    """The arrays among operands, and what puts numbers of the graph back between them."""
    arrays = [value for value in values if isinstance(value, jax.Array)]

    def whole(given: Any) -> list[Any]:
        rest = iter(given)
        return [next(rest) if isinstance(value, jax.Array) else value for value in values]

    return arrays, whole


def _cond(chosen: Any, if_true: Body, if_false: Body, operands: Any, metas: Any) -> list[Any]:
    if isinstance(chosen, bool):
        return _typed((if_true if chosen else if_false)(*operands), metas)
    arrays, whole = _arrays(operands)
    return lax.cond(chosen.reshape(()) != 0, lambda *given: _typed(if_true(*whole(given)), metas),
                    lambda *given: _typed(if_false(*whole(given)), metas), *arrays)


def _while(goes_on: Body, turn: Body, carried: Any, more: Any, metas: Any) -> list[Any]:
    return lax.while_loop(lambda state: goes_on(*state, *more)[0].reshape(()) != 0,
                          lambda state: _typed(turn(*state, *more), metas), _typed(carried, metas))


def _scan(turn: Body, first: Any, rows: Any, more: Any, metas: Any) -> list[Any]:
    count = len(first)
    outputs = metas[count:]

    def step(carry: Any, row: Any) -> Any:
        made = turn(*carry, *row, *more)
        return _typed(made[:count], metas), _typed(made[count:], outputs)

    carry, made = lax.scan(step, _typed(first, metas), list(rows))
    return [*carry, *made]


def _map(turn: Body, rows: Any, more: Any) -> list[Any]:
    return list(lax.map(lambda row: list(turn(*row, *more)), list(rows)))
