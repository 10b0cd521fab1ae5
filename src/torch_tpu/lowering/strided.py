"""Strided windows on a row-major array, as JAX operations.

A tensor is (array of shape `base`, sizes, strides, offset). `plan` finds a reshape + slice + transpose + broadcast
that reads the window; `read` and `write` carry it out inside a traced function. Only windows that no such chain
describes (diagonals, overlapping unfolds) gather and scatter by element.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class View:
    """A window: element sizes, strides and offset over a row-major array."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def of(tensor: Any) -> View:
    """The window a torch tensor is on its storage."""
    return View(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


@dataclass(frozen=True)
class Chain:
    """reshape to `factors`, slice, transpose by `order`, reshape to `core`, broadcast to the sizes."""

    factors: tuple[int, ...]
    starts: tuple[int, ...]
    limits: tuple[int, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]
    core: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether every element of the array is inside the window."""
        return all(s == 0 and k == 1 for s, k in zip(self.starts, self.steps)) and self.limits == self.factors


@functools.lru_cache(maxsize=16384)
def plan(base: tuple[int, ...], view: View) -> Chain | None:
    """The chain that reads `view` from an array of shape `base`; None when it takes a gather."""
    total = math.prod(base)
    dims = [(n, s, d) for d, (n, s) in enumerate(zip(view.sizes, view.strides)) if n != 1 and s != 0]
    if total == 0 or 0 in view.sizes or any(s < 0 for _, s, _ in dims):
        return None
    dims.sort(key=lambda item: -item[1])
    factors = [(s, n) for n, s in zip(base, _row_major(base)) if n != 1]
    for candidate in _factorings(factors, [s for _, s, _ in dims], total):
        found = _assign(candidate, dims, view)
        if found is not None:
            return found
    return None


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides, acc = [], 1
    for n in reversed(shape):
        strides.append(acc)
        acc *= n
    return strides[::-1]


def _factorings(factors: list[tuple[int, int]], cuts: list[int], total: int):
    """Ways to see the array as a box: its own shape, then with the view's strides as further cuts, then those alone."""
    yield factors
    for marks in ({s for s, _ in factors} | set(cuts), set(cuts)):
        ordered = sorted(marks | {1}, reverse=True)
        result, outer = [], total
        for stride in ordered:
            if outer % stride:
                break
            if outer != stride:
                result.append((stride, outer // stride))
            outer = stride
        else:
            yield result


def _assign(factors: list[tuple[int, int]], dims: list[tuple[int, int, int]], view: View) -> Chain | None:
    offset, digits = view.offset, []
    for stride, _ in factors:
        digits.append(offset // stride)
        offset %= stride
    if offset:
        return None
    starts, limits, steps = list(digits), [o + 1 for o in digits], [1] * len(factors)
    owner: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for n, stride, d in dims:
        # factors are outermost first, so the first stride that divides is the largest one
        j = next((i for i, (f, _) in enumerate(factors) if f <= stride and stride % f == 0), None)
        if j is None or j in owner:
            return None
        used = []
        while True:
            f, radix = factors[j]
            step = stride // f
            if j in owner:
                return None
            if digits[j] + (n - 1) * step < radix:
                starts[j], limits[j], steps[j] = digits[j], digits[j] + (n - 1) * step + 1, step
                owner[j] = d
                used.append(j)
                break
            # The dimension runs through this whole factor and on into the next outer one.
            if step != 1 or digits[j] or n % radix or j == 0:
                return None
            starts[j], limits[j], steps[j] = 0, radix, 1
            owner[j] = d
            used.append(j)
            n //= radix
            j -= 1
            stride = factors[j][0]
        groups[d] = sorted(used)
    order = [j for j in range(len(factors)) if j not in owner]
    for d in range(len(view.sizes)):
        order += groups.get(d, [])
    core = tuple(n if d in groups else 1 for d, n in enumerate(view.sizes))
    return Chain(tuple(r for _, r in factors), tuple(starts), tuple(limits), tuple(steps), tuple(order), core)


def is_whole(base: tuple[int, ...], view: View) -> bool:
    """Whether writing the window replaces the array entirely."""
    if math.prod(base) != math.prod(view.sizes):
        return False
    chain = plan(base, view)
    return chain is not None and chain.whole


def overlaps(view: View) -> bool:
    """Whether two positions of the window are the same element for sure (an expanded dimension)."""
    return any(s == 0 and n > 1 for n, s in zip(view.sizes, view.strides)) and 0 not in view.sizes


def read(array: Any, view: View, dtype: np.dtype) -> Any:
    """The window's values, of shape view.sizes and the given dtype (a reinterpretation of the array's bits)."""
    array = reinterpret(array, dtype)
    if array.shape == view.sizes and view.offset == 0 and view.strides == tuple(_contiguous(view.sizes)):
        return array
    if 0 in view.sizes:
        return jnp.zeros(view.sizes, dtype)
    _check(array.size, view)
    chain = plan(array.shape, view)
    if chain is None:
        flat = array.reshape(-1)
        return jnp.take(flat, _positions(view, flat.size), mode="clip")
    box = _reshape(array, chain.factors)
    if not chain.whole:
        box = lax.slice(box, chain.starts, chain.limits, chain.steps)
    if chain.order != tuple(range(len(chain.order))):
        box = lax.transpose(box, chain.order)
    box = _reshape(box, chain.core)
    return jnp.broadcast_to(box, view.sizes) if box.shape != view.sizes else box


def write(array: Any, view: View, value: Any) -> Any:
    """The array with the window replaced by `value` (of shape view.sizes, of the window's dtype)."""
    if 0 in view.sizes:
        return array
    kind = array.dtype
    elements = reinterpret(array, value.dtype)
    _check(elements.size, view)
    if overlaps(view):
        view, value = _collapse(view, value, read(elements, view, value.dtype))
    changed = _write(elements, view, value)
    back = reinterpret(changed, kind)
    return back if back.shape == array.shape else back.reshape(array.shape)


def _collapse(view: View, value: Any, before: Any) -> tuple[View, Any]:
    """A write to an expanded window as one to the memory under it: the last position that changed an element wins."""
    changed = value != before
    if np.dtype(value.dtype).kind not in "iub":
        changed &= ~((value != value) & (before != before))  # nan stayed nan
    sizes = list(view.sizes)
    for d, (n, stride) in enumerate(zip(view.sizes, view.strides)):
        if stride == 0 and n > 1:
            last = n - 1 - jnp.argmax(jnp.flip(changed, d), axis=d, keepdims=True).astype(jnp.int32)
            value = jnp.take_along_axis(value, last, axis=d)
            changed = changed.any(axis=d, keepdims=True)
            sizes[d] = 1
    return View(tuple(sizes), view.strides, view.offset), value


def _check(total: int, view: View) -> None:
    """as_strided may name memory outside the storage; it is refused here, where it would be used."""
    last = view.offset + sum((n - 1) * s for n, s in zip(view.sizes, view.strides))
    if last >= total or view.offset < 0:
        raise RuntimeError(f"setStorage: sizes {list(view.sizes)}, strides {list(view.strides)}, storage offset "
                           f"{view.offset} are out of bounds for a storage of {total} elements")


def _write(array: Any, view: View, value: Any) -> Any:
    chain = plan(array.shape, view)
    if chain is None:
        flat = array.reshape(-1)
        flat = flat.at[_positions(view, flat.size)].set(value, mode="promise_in_bounds")
        return flat.reshape(array.shape)
    spans = [-(-(hi - lo) // step) for lo, hi, step in zip(chain.starts, chain.limits, chain.steps)]
    inverse = np.argsort(chain.order)
    box = _reshape(value, tuple(spans[j] for j in chain.order))
    if chain.order != tuple(range(len(chain.order))):
        box = lax.transpose(box, tuple(int(i) for i in inverse))
    if chain.whole:
        return box.reshape(array.shape)
    target = _reshape(array, chain.factors)
    if all(step == 1 for step in chain.steps):
        target = lax.dynamic_update_slice(target, box, [np.int32(s) for s in chain.starts])
    else:
        target = target.at[tuple(slice(lo, hi, step) for lo, hi, step in zip(chain.starts, chain.limits, chain.steps))
                           ].set(box, unique_indices=True, indices_are_sorted=True)
    return target.reshape(array.shape)


def _reshape(array: Any, shape: tuple[int, ...]) -> Any:
    return array if array.shape == shape else array.reshape(shape)


def _contiguous(sizes: tuple[int, ...]) -> list[int]:
    strides = [1] * len(sizes)
    for d in range(len(sizes) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(sizes[d + 1], 1)
    return strides


def _positions(view: View, total: int) -> Any:
    """The flat element index of every position of the window."""
    kind = jnp.int32 if total < 2**31 else jnp.int64
    result = jnp.full(view.sizes, view.offset, kind)
    for d, stride in enumerate(view.strides):
        if stride and view.sizes[d] > 1:
            result = result + lax.broadcasted_iota(kind, view.sizes, d) * jnp.asarray(stride, kind)
    return result


def reinterpret(array: Any, dtype: np.dtype) -> Any:
    """The array's bits as another dtype. The last dimension grows or shrinks with the size of an element."""
    have, want = np.dtype(array.dtype), np.dtype(dtype)
    if have == want:
        return array
    if have.kind == "c":
        part = np.dtype(f"f{have.itemsize // 2}")
        array = jnp.stack([array.real, array.imag], -1).astype(part)
        return reinterpret(_merge_last(array) if array.ndim > 1 else array, want)
    if want.kind == "c":
        part = np.dtype(f"f{want.itemsize // 2}")
        pairs = reinterpret(array, part).reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1])
    if have == np.bool_:
        array, have = array.astype(jnp.uint8), np.dtype(np.uint8)
    if want == np.bool_:
        return reinterpret(array, np.dtype(np.uint8)) != 0
    if have == want:
        return array
    if have.itemsize == want.itemsize:
        return lax.bitcast_convert_type(array, want)
    if have.itemsize > want.itemsize:
        wide = lax.bitcast_convert_type(array, want)
        return _merge_last(wide) if wide.ndim > 1 else wide
    ratio = want.itemsize // have.itemsize
    return lax.bitcast_convert_type(array.reshape(-1, ratio), want)


def _merge_last(array: Any) -> Any:
    """The last two dimensions as one; not by -1, which an empty array does not determine."""
    return array.reshape(*array.shape[:-2], array.shape[-2] * array.shape[-1])
