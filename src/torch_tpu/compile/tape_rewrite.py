"""The rewrites of rewrite.py for a captured step, whose views are windows on values instead of operators."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..lowering import scatter, strided, table
from ..lowering.axes import dim_of
from ..tensor import buffer
from . import tape

if TYPE_CHECKING:
    from .tape import Entry, Read

_ROWS = table.Lowering("rows", scatter.write_rows)


def better(entry: Entry) -> Entry:
    """The entry, or one with the same results that the device computes in fewer steps."""
    rule = _RULES.get(entry.name)
    return entry if rule is None else rule(entry) or entry


def _whole(read: Any) -> bool:
    """Whether the argument is all of a value, row-major."""
    if not isinstance(read, tape.Read):
        return False
    view = read.view
    return view.offset == 0 and view.strides == buffer.contiguous(view.sizes) and \
        buffer.contiguous(read.value.shape)[:1] == view.strides[:1] and read.dtype == read.value.dtype


def _before_repeat(read: Any) -> Read | None:
    """What (..., H, L, D) the argument repeats: it copies a window in which each head stands several times."""
    maker = read.value.maker if isinstance(read, tape.Read) else None
    if maker is None or maker.name != "aten.clone.default" or not isinstance(maker.positional[0], tape.Read):
        return None
    source, sizes = maker.positional[0], maker.positional[0].view.sizes
    if len(sizes) < 4 or source.view.strides[-3] != 0 or read.value.shape != sizes or read.view.offset != 0 or \
            read.dtype != read.value.dtype:
        return None
    if read.view.sizes != (*sizes[:-4], sizes[-4] * sizes[-3], *sizes[-2:]) or \
            read.view.strides != buffer.contiguous(read.view.sizes):
        return None
    strides = source.view.strides
    view = strided.View((*sizes[:-3], *sizes[-2:]), (*strides[:-3], *strides[-2:]), source.view.offset)
    return replace(source, view=view)


def _attention(entry: Entry) -> Entry | None:
    query, key, value, *rest = entry.positional
    few_keys, few_values = _before_repeat(key), _before_repeat(value)
    if few_keys is None or few_values is None or few_keys.view.sizes[:-1] != few_values.view.sizes[:-1]:
        return None
    return replace(entry, positional=[query, few_keys, few_values, *rest])


def _first_of_range(read: Any, count: int) -> Any:
    """The Read or number s where the argument is [s, s + 1, ..., s + count - 1], else None."""
    if not _whole(read) or read.view.sizes != (count,):
        return None
    maker = read.value.maker
    if maker is None:  # torch.arange is computed on the host, and so a constant
        numbers = read.value.literal
        known = numbers is not None and np.array_equal(numbers.reshape(-1), numbers.flat[0] + np.arange(count))
        return int(numbers.flat[0]) if known else None
    if maker.name != "aten.add.Tensor" or maker.named.get("alpha", 1) != 1:
        return None
    for base, offset in (maker.positional, maker.positional[::-1]):
        if isinstance(base, tape.Read) and base.value.maker is None and _first_of_range(base, count) == 0 and \
                (isinstance(offset, int) or (isinstance(offset, tape.Read) and offset.view.sizes in ((), (1,)))):
            return offset
    return None


def _index_copy(entry: Entry) -> Entry | None:
    into, dim, index, source = entry.positional
    if not isinstance(into, tape.Read) or not isinstance(source, tape.Read) or not isinstance(dim, int):
        return None
    sizes, rows = into.view.sizes, source.view.sizes
    if not sizes or len(sizes) != len(rows) or 0 in sizes:
        return None
    dim = dim_of(dim, len(sizes))
    if not 0 < rows[dim] <= sizes[dim] or rows != (*sizes[:dim], rows[dim], *sizes[dim + 1:]):
        return None
    first = _first_of_range(index, rows[dim])
    return None if first is None else replace(entry, name="rows", lowering=_ROWS, positional=[into, source, first, dim])


_RULES = {"tpu.sdpa.default": _attention, "aten.index_copy.default": _index_copy}
