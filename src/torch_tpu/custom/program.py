"""A user's JAX function, traced over flat arrays: what it returns, what it computes, and its gradient.

The function sees JAX as its author's own code does: 64-bit types only where the process has switched them on (or the
operator asks for them). Integers of 64 bits, which are PyTorch's default, come to it as 32 bits, as `jax.numpy.asarray`
would make them; floats of 64 bits are refused, since their precision would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..runtime import dynamo_door, jax_door, pallas_door

Aval = tuple[tuple[int, ...], np.dtype]

_NARROW = {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}
_LOSSY = {np.dtype(np.float64), np.dtype(np.complex128)}


@dataclass(frozen=True)
class Traced:
    """A function over flat arrays of known shapes and dtypes.

    Attributes:
        results: shapes and dtypes of its flat results.
    """

    jaxpr: Any
    results: tuple[jax.ShapeDtypeStruct, ...]
    takes: tuple[np.dtype, ...]
    wide: bool

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Inside a trace: the results."""
        with jax_door.width(True):
            arrays = [array if array.dtype == kind else array.astype(kind) for array, kind in zip(arrays, self.takes)]
        with jax_door.width(self.wide):
            return jax_door.replay(self.jaxpr, arrays)


def wide(asked: bool) -> bool:
    """Whether a function is to have 64-bit types."""
    return asked or jax_door.users_width()


def seen(kind: np.dtype, wide: bool, name: str) -> np.dtype:
    """The dtype in which a function sees an array.

    Raises:
        TypeError: it would lose precision.
    """
    if wide:
        return kind
    if kind in _LOSSY:
        raise TypeError(f"{name}: a {kind.name} tensor, and JAX has no 64-bit floats unless it is told so; give "
                        "jax_op(..., x64=True), or convert the tensor to a narrower dtype")
    return _NARROW.get(kind, kind)


def trace(fn: Callable[..., Sequence[Any]], avals: Sequence[Aval], wide: bool, name: str) -> Traced:
    """Traces a function from flat arrays to flat arrays.

    Raises:
        TypeError: it returns something else.
    """
    takes = tuple(seen(kind, wide, name) for _, kind in avals)
    structs = [jax.ShapeDtypeStruct(shape, kind) for (shape, _), kind in zip(avals, takes)]
    with dynamo_door.untraced(), jax_door.width(wide):
        try:
            traced = jax.jit(fn, keep_unused=True).trace(*structs)
        except Exception as error:
            given = ", ".join(f"{each.dtype.name}{list(each.shape)}" for each in structs)
            error.add_note(f"in the JAX function of {name}, called with {given}")
            raise
        results = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in jax.tree.leaves(traced.out_info))
    pallas_door.install_if_used()
    return Traced(traced.jaxpr, results, takes, wide)


@dataclass(frozen=True)
class Kept:
    """Where a value that the backward pass needs comes from: an input, an output, or the forward pass besides."""

    where: str  # "input", "output", "residual"
    index: int


@dataclass(frozen=True)
class Gradient:
    """A function with its gradient, as two programs.

    Attributes:
        forward: arrays -> outputs, residuals.
        backward: gradients of the outputs, kept values -> gradients of the inputs in `differentiable`.
        outputs: how many of the forward's results are outputs.
        kept: what the backward pass needs, in order.
        differentiable: positions of the inputs that have a gradient.
    """

    forward: Traced
    backward: Traced
    outputs: int
    kept: tuple[Kept, ...]
    differentiable: tuple[int, ...]


def gradient(fn: Callable[..., Sequence[Any]], avals: Sequence[Aval], wide: bool, name: str) -> Gradient:
    """A function with the gradient that jax.vjp gives it (its own jax.custom_vjp, where it has one).

    Values that the backward pass needs and that are inputs or outputs are not kept twice.
    """
    found: dict[str, Any] = {}
    kinds = [seen(kind, wide, name) for _, kind in avals]
    differentiable = tuple(at for at, kind in enumerate(kinds) if jnp.issubdtype(kind, jnp.inexact))

    def forward(*arrays: Any) -> list[Any]:
        def of_floats(*floats: Any) -> list[Any]:
            merged = list(arrays)
            for at, value in zip(differentiable, floats):
                merged[at] = value
            return list(fn(*merged))

        outputs, pull = jax.vjp(of_floats, *(arrays[at] for at in differentiable))
        leaves, tree = jax.tree.flatten(pull)
        kept: list[Kept] = []
        residuals: list[Any] = []
        for leaf in leaves:
            at = _place(leaf, arrays)
            out = _place(leaf, outputs)
            if at is not None:
                kept.append(Kept("input", at))
            elif out is not None:
                kept.append(Kept("output", out))
            else:
                kept.append(Kept("residual", len(residuals)))
                residuals.append(leaf)
        found.update(tree=tree, kept=tuple(kept), outputs=[(o.shape, o.dtype) for o in outputs])
        return [*outputs, *residuals]

    traced = trace(forward, avals, wide, name)
    shapes = found["outputs"]
    needed = _shapes(found["kept"], avals, kinds, traced.results, len(shapes))

    def backward(*arrays: Any) -> list[Any]:
        return list(jax.tree.unflatten(found["tree"], arrays[len(shapes):])(_cotangents(arrays[:len(shapes)], shapes)))

    upstream = [(shape, kind if jnp.issubdtype(kind, jnp.inexact) else np.dtype(np.float32)) for shape, kind in shapes]
    return Gradient(traced, trace(backward, [*upstream, *needed], wide, name), len(shapes), found["kept"],
                    differentiable)


def pull(fn: Callable[..., Sequence[Any]], arrays: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Gradients of the floating arrays for gradients of the results (None: zero)."""
    differentiable = [at for at, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.inexact)]

    def of_floats(*floats: Any) -> list[Any]:
        merged = list(arrays)
        for at, value in zip(differentiable, floats):
            merged[at] = value
        return list(fn(*merged))

    outputs, back = jax.vjp(of_floats, *(arrays[at] for at in differentiable))
    shapes = [(out.shape, out.dtype) for out in outputs]
    return list(back(_cotangents(grads, shapes)))


def _cotangents(grads: Sequence[Any], shapes: Sequence[Aval]) -> list[Any]:
    return [(jnp.zeros(shape, kind) if grad is None else grad) if jnp.issubdtype(kind, jnp.inexact)
            else np.zeros(shape, jax.dtypes.float0) for grad, (shape, kind) in zip(grads, shapes)]


def _place(leaf: Any, values: Sequence[Any]) -> int | None:
    return next((at for at, value in enumerate(values) if value is leaf), None)


def _shapes(kept: Sequence[Kept], avals: Sequence[Aval], kinds: Sequence[np.dtype],
            results: Sequence[jax.ShapeDtypeStruct], outputs: int) -> list[Aval]:
    found: list[Aval] = []
    for each in kept:
        if each.where == "input":
            found.append((avals[each.index][0], kinds[each.index]))
        else:
            result = results[each.index + (outputs if each.where == "residual" else 0)]
            found.append((result.shape, result.dtype))
    return found
