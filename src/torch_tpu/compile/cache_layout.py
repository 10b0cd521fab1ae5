"""How caches that are written row by row lie in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax

from ..runtime import executable
from ..tensor import buffer


def drop_leading_ones(buffers: Iterable[buffer.Buffer | None]) -> bool:
    """Lays buffers without their leading dimensions of one, in place; whether there were any. XLA:CPU (jaxlib 0.10.2)
    takes those from the operands of a product, and to do so copies a whole cache before each row that is written."""
    found = [held for held in buffers if held is not None and held.shape[:1] == (1,) and len(held.shape) > 1]
    for held in found:
        held.rebind(_without(held.kind, held.shared)([held.array()])[0])
    return bool(found)


@functools.cache
def _without(kind: buffer.Kind, shared: bool) -> executable.Executable:
    shape = kind.shape
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return executable.build(lambda x: [x.reshape(shape)], [jax.ShapeDtypeStruct(kind.shape, kind.dtype)],
                            "layout of a cache", [] if shared else [0])
