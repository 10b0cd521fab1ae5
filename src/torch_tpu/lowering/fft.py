"""Fourier transforms. One dimension at a time where there are more than XLA's three."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from .table import lowering


def _factor(sizes, normalization):
    """0: none, 1: by the root of the number of points, 2: by the number of points."""
    count = math.prod(sizes)
    return 1.0 if normalization == 0 or count == 0 else (count ** -0.5 if normalization == 1 else 1.0 / count)


def _scaled(x, factor):
    return x if factor == 1.0 else x * jnp.asarray(factor, x.real.dtype)


def _complex(x, dims, forward):
    for dim in dims:
        x = jnp.fft.fft(x, axis=dim) if forward else jnp.fft.ifft(x, axis=dim, norm="forward")
    return x


@lowering("aten._fft_c2c.default")
def c2c(self, dim, normalization, forward):
    if 0 in self.shape:
        return self
    return _scaled(_complex(self, dim, forward), _factor([self.shape[d] for d in dim], normalization))


@lowering("aten._fft_r2c.default")
def r2c(self, dim, normalization, onesided):
    factor = _factor([self.shape[d] for d in dim], normalization)
    *others, last = dim
    if not onesided:
        kind = np.dtype(np.complex128 if self.dtype == np.float64 else np.complex64)
        return _scaled(_complex(self.astype(kind), dim, True), factor)
    return _scaled(_complex(jnp.fft.rfft(self, axis=last), others, True), factor)


@lowering("aten._fft_c2r.default")
def c2r(self, dim, normalization, last_dim_size):
    *others, last = dim
    sizes = [self.shape[d] for d in others] + [last_dim_size]
    out = jnp.fft.irfft(_complex(self, others, False), n=last_dim_size, axis=last, norm="forward")
    return _scaled(out, _factor(sizes, normalization))
