"""Views as functions: what compiled graphs use (eager tensors share storage instead), and the copying forms of both."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import strided
from .axes import dim_of, dims_of, sized, transpose_of, windows
from .table import lowering


@lowering("aten.alias.default", "aten.alias_copy.default", "aten.detach.default", "aten.detach_copy.default",
          "aten.lift.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default", "aten.contiguous.default",
          "aten.resolve_conj.default", "aten.resolve_neg.default")
def alias(self):
    return self


@lowering("aten.view.default", "aten.view_copy.default", "aten._unsafe_view.default", "aten.reshape.default",
          "aten._reshape_copy.default")
def view(self, size):
    return self.reshape(sized(size, self.size))


@lowering("aten._reshape_alias.default", "aten._reshape_alias_copy.default")
def reshape_alias(self, size, stride):
    return self.reshape(tuple(size))


@lowering("aten.view.dtype", "aten.view_copy.dtype")
def view_dtype(self, dtype):
    have, want = np.dtype(self.dtype).itemsize, np.dtype(dtype).itemsize
    shape = self.shape if have == want else (*self.shape[:-1], self.shape[-1] * have // want)
    return strided.reinterpret(self, np.dtype(dtype)).reshape(shape)


@lowering("aten.view_as_real.default", "aten.view_as_real_copy.default")
def view_as_real(self):
    return jnp.stack([self.real, self.imag], -1)


@lowering("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def view_as_complex(self):
    return lax.complex(self[..., 0], self[..., 1])


@lowering("aten.real.default")
def real(self):
    return self.real


@lowering("aten.imag.default")
def imag(self):
    return self.imag


@lowering("aten._conj.default", "aten._conj_copy.default")
def conj(self):
    return jnp.conj(self)


@lowering("aten._neg_view.default", "aten._neg_view_copy.default")
def neg_view(self):
    return -self


@lowering("aten.permute.default", "aten.permute_copy.default")
def permute(self, dims):
    return self.transpose(dims_of(dims, self.ndim))


@lowering("aten.transpose.int", "aten.transpose_copy.int")
def transpose(self, dim0, dim1):
    return self.swapaxes(dim_of(dim0, self.ndim), dim_of(dim1, self.ndim)) if self.ndim else self


@lowering("aten.t.default", "aten.t_copy.default")
def t(self):
    return self.T


@lowering("aten.movedim.int", "aten.movedim.intlist")
def movedim(self, source, destination):
    return jnp.moveaxis(self, source, destination)


@lowering("aten.expand.default", "aten.expand_copy.default")
def expand(self, size, implicit=False):
    lead = len(size) - self.ndim
    return jnp.broadcast_to(self, tuple(self.shape[d - lead] if n == -1 else n for d, n in enumerate(size)))


@lowering("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def unsqueeze(self, dim):
    return jnp.expand_dims(self, dim_of(dim, self.ndim + 1))


@lowering("aten.squeeze.default", "aten.squeeze_copy.default", "aten.squeeze.dim", "aten.squeeze_copy.dim",
          "aten.squeeze.dims", "aten.squeeze_copy.dims")
def squeeze(self, dim=None):
    dims = range(self.ndim) if dim is None else dims_of(dim, self.ndim)
    return self.reshape(tuple(n for d, n in enumerate(self.shape) if n != 1 or d not in dims))


def bounds(size, start, end, step):
    """Python's rule for a slice with a positive step: (start, end, how many)."""
    start, end, step = slice(start, end, step).indices(size)
    return start, max(end, start), len(range(start, end, step))


@lowering("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(self, dim=0, start=None, end=None, step=1):
    dim = dim_of(dim, self.ndim)
    start, end, _ = bounds(self.shape[dim], start, end, step)
    return lax.slice_in_dim(self, start, end, step, dim)


@lowering("aten.narrow.default", "aten.narrow_copy.default")
def narrow(self, dim, start, length):
    dim = dim_of(dim, self.ndim)
    start = start + self.shape[dim] if start < 0 else start
    return lax.slice_in_dim(self, start, start + length, 1, dim)


@lowering("aten.select.int", "aten.select_copy.int")
def select(self, dim, index):
    dim = dim_of(dim, self.ndim)
    return lax.index_in_dim(self, index, dim, keepdims=False)


@lowering("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default", "aten.split.sizes",
          "aten.unsafe_split_with_sizes.default")
def split_with_sizes(self, split_sizes, dim=0):
    dim, start, parts = dim_of(dim, self.ndim), 0, []
    for n in split_sizes:
        parts.append(lax.slice_in_dim(self, start, start + n, 1, dim))
        start += n
    return parts


@lowering("aten.split.Tensor", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor")
def split(self, split_size, dim=0):
    n = self.shape[dim_of(dim, self.ndim)]
    count = max(-(-n // split_size), 1) if split_size else 1
    return split_with_sizes(self, [min(split_size, n - i * split_size) for i in range(count)], dim)


@lowering("aten.chunk.default", "aten.unsafe_chunk.default")
def chunk(self, chunks, dim=0):
    n = self.shape[dim_of(dim, self.ndim)]
    if n == 0:
        return [self] * chunks
    return split(self, -(-n // chunks), dim)


@lowering("aten.unbind.int", "aten.unbind_copy.int")
def unbind(self, dim=0):
    return [select(self, dim, i) for i in range(self.shape[dim_of(dim, self.ndim)])]


@lowering("aten.as_strided.default", "aten.as_strided_copy.default")
def as_strided(self, size, stride, storage_offset=None):
    return strided.read(self, strided.View(tuple(size), tuple(stride), storage_offset or 0), self.dtype)


@lowering("aten.unfold.default", "aten.unfold_copy.default")
def unfold(self, dimension, size, step):
    if self.ndim == 0:
        return jnp.broadcast_to(self.reshape(1), (1,))[:size]
    dim = dim_of(dimension, self.ndim)
    return jnp.moveaxis(windows(self, dim, size, step), dim + 1, -1)


@lowering("aten.unfold_backward.default")
def unfold_backward(grad_in, input_sizes, dim, size, step):
    if not input_sizes:
        return grad_in.reshape(-1).sum()
    dim = dim_of(dim, len(input_sizes))
    return transpose_of(lambda x: unfold(x, dim, size, step), input_sizes, grad_in)


@lowering("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(self, offset=0, dim1=0, dim2=1):
    dim1, dim2 = dim_of(dim1, self.ndim), dim_of(dim2, self.ndim)
    rows, columns = _diagonal(self.shape[dim1], self.shape[dim2], offset)
    return jnp.moveaxis(jnp.moveaxis(self, (dim1, dim2), (0, 1))[rows, columns], 0, -1)


def _diagonal(rows, columns, offset):
    top, left = max(-offset, 0), max(offset, 0)
    step = np.arange(max(min(rows - top, columns - left), 0), dtype=np.int32)
    return step + top, step + left


@lowering("aten.diagonal_scatter.default")
def diagonal_scatter(self, src, offset=0, dim1=0, dim2=1):
    dim1, dim2 = dim_of(dim1, self.ndim), dim_of(dim2, self.ndim)
    where = _diagonal(self.shape[dim1], self.shape[dim2], offset)
    front = jnp.moveaxis(self, (dim1, dim2), (0, 1)).at[where].set(
        jnp.moveaxis(src.astype(self.dtype), -1, 0), unique_indices=True)
    return jnp.moveaxis(front, (0, 1), (dim1, dim2))


@lowering("aten.diagonal_backward.default")
def diagonal_backward(grad_output, input_sizes, offset, dim1, dim2):
    return diagonal_scatter(jnp.zeros(tuple(input_sizes), grad_output.dtype), grad_output, offset, dim1, dim2)


@lowering("aten.slice_scatter.default")
def slice_scatter(self, src, dim=0, start=None, end=None, step=1):
    dim = dim_of(dim, self.ndim)
    start, end, count = bounds(self.shape[dim], start, end, step)
    src = jnp.broadcast_to(src.astype(self.dtype), (*self.shape[:dim], count, *self.shape[dim + 1:]))
    if count == self.shape[dim]:
        return src
    if step == 1:
        return lax.dynamic_update_slice_in_dim(self, src, np.int32(start), dim)
    return self.at[(slice(None),) * dim + (slice(start, end, step),)].set(src, unique_indices=True)


@lowering("aten.select_scatter.default")
def select_scatter(self, src, dim, index):
    dim = dim_of(dim, self.ndim)
    index = index + self.shape[dim] if index < 0 else index
    return slice_scatter(self, jnp.expand_dims(jnp.broadcast_to(
        src, self.shape[:dim] + self.shape[dim + 1:]), dim), dim, index, index + 1)


@lowering("aten.as_strided_scatter.default")
def as_strided_scatter(self, src, size, stride, storage_offset=None):
    return strided.write(self, strided.View(tuple(size), tuple(stride), storage_offset or 0), src.astype(self.dtype))


def _spaced(x, sizes, dim, start, step):
    """Zeros of the given sizes with x at every `step`-th position of a dimension from `start`."""
    n = x.shape[dim]
    if 0 in x.shape:
        return jnp.zeros(tuple(sizes), x.dtype)
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (start, sizes[dim] - start - (n - 1) * step - 1, step - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


@lowering("aten.slice_backward.default")
def slice_backward(grad_output, input_sizes, dim, start, end, step):
    dim = dim_of(dim, len(input_sizes))
    start, _, _ = bounds(input_sizes[dim], start, end, step)
    return _spaced(grad_output, input_sizes, dim, start, step)


@lowering("aten.select_backward.default")
def select_backward(grad_output, input_sizes, dim, index):
    dim = dim_of(dim, len(input_sizes))
    index = index + input_sizes[dim] if index < 0 else index
    return _spaced(jnp.expand_dims(grad_output, dim), input_sizes, dim, index, 1)
