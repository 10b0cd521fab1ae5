"""Sliding windows over trailing dimensions, as strided slices that XLA fuses: pooling.

`at(x, offset)` is every window's element at one offset, `place` its transpose; so no window is ever materialised and
no gradient needs a scatter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def each(values: Any, rank: int, default: Sequence[int] | None = None) -> tuple[int, ...]:
    """PyTorch's int[n] argument, for which one number stands for all."""
    values = (values,) if isinstance(values, int) else tuple(values)
    if not values and default is not None:
        return tuple(default)
    return values * rank if len(values) == 1 else values


@dataclass(frozen=True)
class Windows:
    """Windows over the last len(kernel) dimensions, of sizes `sizes`."""

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    out: tuple[int, ...]

    @classmethod
    def make(cls, shape: Sequence[int], rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1,
             ceil_mode: bool = False) -> Windows:
        kernel = each(kernel, rank)
        stride, padding, dilation = each(stride, rank, kernel), each(padding, rank), each(dilation, rank)
        sizes = tuple(shape[len(shape) - rank:])
        out = []
        for n, k, s, p, d in zip(sizes, kernel, stride, padding, dilation):
            count = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s + 1
            if ceil_mode and (count - 1) * s >= n + p:
                count -= 1  # the last window must start inside the input or its left padding
            out.append(count)
        return cls(sizes, kernel, stride, padding, dilation, tuple(out))

    def along(self, axis: int, current: Sequence[int]) -> Windows:
        """The windows of one dimension only, over an array whose last dimensions are now `current`."""
        def only(values: Sequence[int], neutral: Sequence[int]) -> tuple[int, ...]:
            return tuple(v if i == axis else n for i, (v, n) in enumerate(zip(values, neutral)))

        rank = len(self.kernel)
        ones, current = (1,) * rank, tuple(current)[-rank:]
        return Windows(current, only(self.kernel, ones), only(self.stride, ones), only(self.padding, (0,) * rank),
                       only(self.dilation, ones), only(self.out, current))

    def offsets(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(k) for k in self.kernel))

    def _extent(self) -> list[int]:
        """Sizes of the padded input that the windows reach."""
        return [max(n + 2 * p, (o - 1) * s + d * (k - 1) + 1) for n, p, o, s, d, k in zip(
            self.sizes, self.padding, self.out, self.stride, self.dilation, self.kernel)]

    def pad(self, x: Any, value: Any) -> Any:
        lead = x.ndim - len(self.kernel)
        config = [(0, 0, 0)] * lead + [(p, e - n - p, 0) for n, p, e in zip(self.sizes, self.padding, self._extent())]
        return lax.pad(x, jnp.asarray(value, x.dtype), config)

    def at(self, padded: Any, offset: Sequence[int]) -> Any:
        lead = padded.ndim - len(self.kernel)
        start = [i * d for i, d in zip(offset, self.dilation)]
        limit = [b + (o - 1) * s + 1 for b, o, s in zip(start, self.out, self.stride)]
        return lax.slice(padded, [0] * lead + start, [*padded.shape[:lead], *limit], [1] * lead + list(self.stride))

    def place(self, value: Any, offset: Sequence[int]) -> Any:
        """A value for every window, on the padded input's grid at one offset; 0 elsewhere."""
        lead = value.ndim - len(self.kernel)
        config = [(0, 0, 0)] * lead
        for i, d, o, s, e in zip(offset, self.dilation, self.out, self.stride, self._extent()):
            config.append((i * d, e - i * d - ((o - 1) * s + 1), s - 1))
        return lax.pad(value, jnp.zeros((), value.dtype), config)

    def crop(self, padded: Any) -> Any:
        lead = padded.ndim - len(self.kernel)
        return lax.slice(padded, [0] * lead + list(self.padding),
                         [*padded.shape[:lead], *(p + n for p, n in zip(self.padding, self.sizes))])

    def starts(self) -> list[np.ndarray]:
        """First position of each window along each dimension, negative inside the padding."""
        return [np.arange(o) * s - p for o, s, p in zip(self.out, self.stride, self.padding)]

    def flat(self, positions: Sequence[np.ndarray]) -> Any:
        """Flat index into the input of the given position along each dimension, of shape `out`."""
        index: Any = jnp.zeros((), jnp.int32)
        for axis, (n, position) in enumerate(zip(self.sizes, positions)):
            shape = [1] * len(self.sizes)
            shape[axis] = -1
            index = index * n + jnp.asarray(position, jnp.int32).reshape(shape)
        return index
