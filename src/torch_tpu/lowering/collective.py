"""Collectives as JAX functions. Every process runs the same program as one replica; a process's number in it is its
place among the program's replicas, and `groups` lists those that exchange data.

The operations of StableHLO are emitted directly: JAX's own (`lax.psum`) need a mesh that covers the program, and do not
take groups there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

Groups = tuple[tuple[int, ...], ...]


def after(x: Any, earlier: Sequence[Any]) -> Any:
    """The same bits, which XLA cannot have before it has the earlier values: it adds u (u + 1) mod 2 of their bits,
    which is 0, and which no compiler knows to be 0. (XLA:CPU takes barriers out before it schedules.)"""
    if not earlier or not x.size:
        return x
    u = lax.convert_element_type(_unsigned(earlier[0].reshape(-1)[:1]), jnp.uint32)
    nothing = ((u * (u + jnp.uint32(1))) & jnp.uint32(1)).reshape(())
    if x.dtype == jnp.bool_:
        return x ^ (nothing == 1)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(after(lax.real(x), earlier), after(lax.imag(x), earlier))
    bits = _unsigned(x)
    return lax.bitcast_convert_type(bits + nothing.astype(bits.dtype), x.dtype)


def _unsigned(x: Any) -> Any:
    """Elements as unsigned integers of their width (of a complex number: of its real part; a bool as 0 or 1)."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = lax.real(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))

_REDUCERS: dict[str, Any] = {"sum": hlo.AddOp, "prod": hlo.MulOp, "min": hlo.MinOp, "max": hlo.MaxOp}
_LOCAL: dict[str, Callable[..., Any]] = {"band": jnp.bitwise_and, "bor": jnp.bitwise_or, "bxor": jnp.bitwise_xor}


def _groups_attribute(groups: Groups) -> Any:
    return ir.DenseIntElementsAttr.get(np.array(groups, np.int64))


def _types(ctx: Any) -> list[Any]:
    return [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in ctx.avals_out]


def _body(operation: Any, dtype: Any, reducer: str) -> None:
    scalar = ir.RankedTensorType.get([], mlir.dtype_to_ir_type(np.dtype(dtype)))
    block = operation.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        hlo.return_([_REDUCERS[reducer](*block.arguments).result])


def _primitive(name: str, shape: Callable[..., tuple[int, ...]], lower: Callable[..., Any]) -> Any:
    primitive = Primitive(f"tpu_{name}")
    primitive.def_abstract_eval(lambda x, **params: jax.core.ShapedArray(shape(x.shape, **params), x.dtype))
    mlir.register_lowering(primitive, lower)
    return primitive


def _lower_all_reduce(ctx: Any, x: Any, *, groups: Groups, reducer: str) -> Any:
    operation = hlo.AllReduceOp(_types(ctx), [x], _groups_attribute(groups))
    _body(operation, ctx.avals_in[0].dtype, reducer)
    return operation.results


def _lower_replica(ctx: Any) -> Any:
    return hlo.ReplicaIdOp().results


def _lower_all_gather(ctx: Any, x: Any, *, groups: Groups) -> Any:
    return hlo.AllGatherOp(_types(ctx), [x], 0, _groups_attribute(groups)).results


def _lower_reduce_scatter(ctx: Any, x: Any, *, groups: Groups, reducer: str) -> Any:
    operation = hlo.ReduceScatterOp(_types(ctx)[0], x, 0, _groups_attribute(groups))
    _body(operation, ctx.avals_in[0].dtype, reducer)
    return operation.results


def _lower_all_to_all(ctx: Any, x: Any, *, groups: Groups) -> Any:
    return hlo.AllToAllOp([x], 0, 0, len(groups[0]), _groups_attribute(groups)).results


_all_reduce = _primitive("all_reduce", lambda shape, groups, reducer: shape, _lower_all_reduce)
_all_gather = _primitive("all_gather", lambda shape, groups: (shape[0] * len(groups[0]), *shape[1:]),
                         _lower_all_gather)
_reduce_scatter = _primitive("reduce_scatter", lambda shape, groups, reducer: (shape[0] // len(groups[0]), *shape[1:]),
                             _lower_reduce_scatter)
_all_to_all = _primitive("all_to_all", lambda shape, groups: shape, _lower_all_to_all)


_replica = Primitive("tpu_replica")
_replica.def_abstract_eval(lambda: jax.core.ShapedArray((), np.uint32))
mlir.register_lowering(_replica, _lower_replica)


def is_replica(number: int) -> Any:
    """Whether this process is the replica of that number: a value in the program, which is the same on all."""
    return _replica.bind() == np.uint32(number)


def _carrier(x: Any) -> Any:
    """Narrow floats and booleans travel as bytes."""
    kind = np.dtype(x.dtype)
    if kind == np.bool_:
        return x.astype(np.uint8)
    if kind.itemsize == 1 and kind.kind not in "iu":
        return jax.lax.bitcast_convert_type(x, np.uint8)
    return x


def _from_carrier(x: Any, dtype: Any) -> Any:
    kind = np.dtype(dtype)
    if x.dtype == kind:
        return x
    return x.astype(kind) if kind == np.bool_ else jax.lax.bitcast_convert_type(x, kind)


def all_gather(x: Any, groups: Groups) -> Any:
    """Every member's x, stacked along a new first dimension."""
    members = len(groups[0])
    if x.size == 0:
        return jnp.zeros((members, *x.shape), x.dtype)
    sent = _carrier(x)
    return _from_carrier(_all_gather.bind(sent[None], groups=groups), x.dtype)


def all_to_all(x: Any, groups: Groups) -> Any:
    """x[i] goes to member i; the result's [i] came from member i."""
    if x.size == 0:
        return x
    return _from_carrier(_all_to_all.bind(_carrier(x), groups=groups), x.dtype)


def _wide(x: Any) -> tuple[Any, bool]:
    """A value that XLA can reduce: booleans as bytes, narrow floats as float32."""
    kind = np.dtype(x.dtype)
    if kind == np.bool_:
        return x.astype(np.uint8), True
    if kind.itemsize == 1 and kind.kind not in "iu":
        return x.astype(np.float32), True
    return x, False


def _narrow(x: Any, dtype: Any) -> Any:
    return (x != 0) if np.dtype(dtype) == np.bool_ else x.astype(dtype)


def _mean(total: Any, members: int) -> Any:
    if np.dtype(total.dtype).kind in "iu":
        return total // np.array(members, total.dtype)
    return total / np.array(members, total.dtype)


def all_reduce(x: Any, reducer: str, groups: Groups) -> Any:
    """The elementwise sum, avg, prod, min, max, band, bor or bxor of every member's x."""
    if x.size == 0:
        return x
    members = len(groups[0])
    if reducer in _LOCAL:
        parts = all_gather(x, groups)
        result = parts[0]
        for part in range(1, members):
            result = _LOCAL[reducer](result, parts[part])
        return result
    value, changed = _wide(x)
    if np.dtype(x.dtype) == np.bool_:  # as on other devices: sum and max are "or", prod and min are "and"
        reducer = {"sum": "max", "avg": "min", "prod": "min"}.get(reducer, reducer)
    result = _all_reduce.bind(value, groups=groups, reducer="sum" if reducer == "avg" else reducer)
    if reducer == "avg":
        result = _mean(result, members)
    return _narrow(result, x.dtype) if changed else result


def reduce_scatter(x: Any, reducer: str, groups: Groups) -> Any:
    """x has a first dimension of one row a member; the result is this member's row, reduced over all members."""
    members = len(groups[0])
    if x.size == 0:
        return jnp.zeros(x.shape[1:], x.dtype)
    if reducer in ("sum", "avg", "prod", "min", "max") and np.dtype(x.dtype) != np.bool_:
        value, changed = _wide(x)
        result = _reduce_scatter.bind(value, groups=groups, reducer="sum" if reducer == "avg" else reducer)[0]
        if reducer == "avg":
            result = _mean(result, members)
        return _narrow(result, x.dtype) if changed else result
    parts = all_to_all(x, groups)
    result = parts[0]
    logical: dict[str, Callable[..., Any]] = {
        "sum": jnp.logical_or, "max": jnp.logical_or, "avg": jnp.logical_and, "prod": jnp.logical_and,
        "min": jnp.logical_and}
    combine = _LOCAL.get(reducer) or logical[reducer]
    for part in range(1, members):
        result = combine(result, parts[part])
    return result


def one_group(members: int) -> Groups:
    """All replicas of a program together."""
    return (tuple(range(members)),)


def groups_around(ranks: Sequence[int], replicas: int) -> Groups | None:
    """Groups that cover a program's replicas, one of them `ranks`. The others are of no account to this process, but
    XLA wants all replicas named, in groups of one size. None where the size does not divide."""
    rest = [replica for replica in range(replicas) if replica not in set(ranks)]
    size = len(ranks)
    if len(rest) % size:
        return None
    return (tuple(ranks), *(tuple(rest[i:i + size]) for i in range(0, len(rest), size)))


def _bits(x: Any) -> Any:
    """The value's bits as unsigned integers."""
    kind = np.dtype(x.dtype)
    if kind == np.bool_:
        return x.astype(np.uint8)
    if kind.kind == "c":
        x = jnp.stack([x.real, x.imag])
        kind = np.dtype(x.dtype)
    return x if kind.kind == "u" else jax.lax.bitcast_convert_type(x, np.dtype(f"u{kind.itemsize}"))


def _from_bits(x: Any, dtype: Any) -> Any:
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return x.astype(kind)
    if kind.kind == "c":
        parts = jax.lax.bitcast_convert_type(x, np.dtype(f"f{kind.itemsize // 2}"))
        return jax.lax.complex(parts[0], parts[1])
    return x if x.dtype == kind else jax.lax.bitcast_convert_type(x, kind)


def broadcast(x: Any, is_root: Any, groups: Groups) -> Any:
    """The x of the one member whose `is_root` is true, bit for bit."""
    if x.size == 0:
        return x
    bits = _bits(x)
    total = _all_reduce.bind(jnp.where(is_root, bits, jnp.zeros_like(bits)), groups=groups, reducer="sum")
    return _from_bits(total, x.dtype)
