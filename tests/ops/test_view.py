"""Views: eager tensors share storage; the functional lowerings, which compiled graphs use, give the same values."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from conftest import compare

X = torch.arange(120.0).view(2, 3, 4, 5)

# lowering, arguments after the tensor; the torch operator of the same name is the oracle
FUNCTIONAL = [
    ("view.default", [6, -1]), ("permute.default", [3, 0, -2, 1]), ("transpose.int", 1, -1),
    ("expand.default", [7, -1, 3, 4, 5]),
    ("slice.Tensor", 2, 1, 99, 2), ("slice.Tensor", -1, -3, None, 1), ("slice.Tensor", 0, 5, 9, 1),
    ("select.int", -1, -2),
    ("unsqueeze.default", -2), ("squeeze.dims", [0, 1]), ("unfold.default", 3, 2, 2), ("unfold.default", 3, 3, 1),
    ("diagonal.default", 1, 1, 3), ("diagonal.default", -2, 3, 2), ("as_strided.default", [2, 3], [7, 4], 5),
    ("as_strided.default", [3, 3], [1, 1], 2), ("split.Tensor", 2, 3), ("split_with_sizes.default", [1, 3], 2),
    ("unbind.int", 1), ("narrow_copy.default", 3, 1, 3), ("view.dtype", torch.int32), ("view.dtype", torch.int16),
    ("alias.default",), ("detach.default",), ("unsafe_split.Tensor", 3, 2),
]
BACKWARD = [
    ("slice_backward.default", [2, 3, 4, 11], 3, 1, 10, 2), ("select_backward.default", [2, 3, 9, 4, 5], 2, -4),
    ("diagonal_backward.default", [2, 3, 4, 5, 6], 1, 3, 4), ("unfold_backward.default", [2, 3, 8], 2, 5, 1),
]


def flat(result):
    return list(result) if isinstance(result, list | tuple) else [result]


@pytest.mark.parametrize("name,args", [(n, a) for n, *a in FUNCTIONAL + BACKWARD])
def test_functional_lowerings(name, args):
    from torch_tpu.lowering.table import find
    from torch_tpu.runtime import dtypes

    torch.zeros(1, device="tpu").add_(1)  # loads the table
    x = X[..., :5] if name != "diagonal_backward.default" else torch.arange(24.0 * 5).view(2, 3, 4, 5)
    if name == "unfold_backward.default":
        x = torch.arange(120.0).view(2, 3, 4, 5)
    packet, which = name.split(".")
    want = flat(getattr(getattr(torch.ops.aten, packet), which)(x, *args))
    fn = find(f"aten.{name}").fn
    with jax.enable_x64(True):
        got = flat(fn(jnp.asarray(x.numpy()), *(dtypes.to_numpy(a) if isinstance(a, torch.dtype) else a for a in args)))
    assert len(got) == len(want)
    for w, g in zip(want, got):
        np.testing.assert_array_equal(np.asarray(g), w.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_scatter_forms(dtype):
    compare(lambda x: (torch.slice_scatter(x, x[:, :, :2], 2, 1, 5, 2), torch.select_scatter(x, x[:, 0], 1, -1),
                       torch.diagonal_scatter(x, ~x.diagonal(0, 1, 2).bool(), 0, 1, 2),
                       torch.as_strided_scatter(x, x[0, 0, :2, :2], (2, 2), (7, 2), 3)), X.to(dtype))


def test_copy_forms():
    compare(lambda x: (torch.narrow_copy(x, 2, 1, 3), torch.select_copy(x, 1, -1), torch.view_copy(x, (6, 20)),
                       torch.permute_copy(x, (3, 1, 0, 2)), torch.expand_copy(x[:1], (4, 3, 4, 5)),
                       torch.split_copy(x, 2, 1), torch.unbind_copy(x, 2), torch.unfold_copy(x, 3, 3, 2)), X)


def test_views_share_storage_and_autograd_sees_their_base():
    x = torch.arange(6.0, device="tpu")
    y = x.view(2, 3)
    assert y._is_view() and y._base is x and y.data_ptr() == x.data_ptr()
    assert x[1:].data_ptr() == x.data_ptr() + 4
    a, b = y.unbind(0)
    a.add_(b)
    b.zero_()
    assert x.tolist() == [3, 5, 7, 0, 0, 0]


def test_dtype_views():
    def run(x):
        bits = x.view(torch.int32)
        bits[1:3, 0].copy_(torch.tensor([1065353216, 1073741824]))
        x.view(torch.int16)[0, 1] = 16256
        wide = torch.arange(24, dtype=torch.int16, device=x.device).view(3, 8)
        wide.view(torch.int64)[1] = 7
        wide[:, 4:].view(torch.int32).add_(2)
        return x, bits, x.view(torch.uint8), wide, wide[:, 4:].view(torch.int64), wide[1:].view(torch.float32)

    compare(run, torch.arange(20.0).view(4, 5))


def test_complex_views():
    def run(x):
        y = torch.view_as_complex(x).t()
        y[1] = 3 + 2j
        torch.view_as_real(y)[0, :, 1] = 5
        y.real.mul_(2)
        y.imag[0, 0] = 9
        flagged = y.conj()
        flagged.add_(1j)
        flagged.imag.copy_(torch.ones_like(y.real))
        return x, y, flagged, flagged + 1, flagged.clone(), flagged.imag, flagged @ y.mT, torch.cat([flagged, y])

    compare(run, torch.arange(24.0).view(3, 4, 2))


def test_memory_outside_the_storage_is_refused():
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.arange(24.0, device="tpu").as_strided((30,), (1,)) + 1


# ------------------------------------------------------------------ random chains of views, then writes through them

def strides(x):
    """Those that say where an element is: a dimension of one element may have any."""
    return [s for n, s in zip(x.shape, x.stride()) if n > 1] if x.numel() else []


def _steps(rng, x):
    """One random view of x: a function that works on either device."""
    rank = x.dim()
    d = rng.randrange(rank) if rank else 0
    e = rng.randrange(rank) if rank else 0
    n = x.shape[d] if rank else 1
    start = rng.randrange(n) if n else 0
    choices = [lambda t: t.unsqueeze(d)]
    if rank:
        step = rng.choice([1, 1, 2, 3])
        stop = rng.randint(start, n)
        choices += [lambda t: t.transpose(d, e), lambda t: t.movedim(d, e), lambda t: t.narrow(d, start, stop - start),
                    lambda t: t[(slice(None),) * d + (slice(start, stop + 1, step),)]]
        if n:
            choices += [lambda t: t.select(d, start), lambda t: t.split(max(1, n // 2), d)[-1],
                        lambda t: t.unfold(d, max(1, n // 2), max(1, n // 2))]
        if rank > 1 and d != e:
            choices += [lambda t: t.diagonal(rng_offset, d, e)]
        if x.is_contiguous():
            choices += [lambda t: t.flatten(), lambda t: t.view(*x.shape[:d], -1, *x.shape[d + 1:])
                        if x.numel() else t.transpose(d, e)]
        if n % 2 == 0 and n:
            choices += [lambda t: t.unflatten(d, (2, n // 2)), lambda t: t.unflatten(d, (n // 2, 2))]
        rng_offset = rng.choice([0, 1, -1])
    return rng.choice(choices)


def _write(rng):
    number = rng.randint(1, 9)
    return rng.choice([lambda t: t.add_(number), lambda t: t.mul_(t), lambda t: t.zero_(), lambda t: t.fill_(number),
                       lambda t: t.copy_(torch.arange(float(t.numel())).view(t.shape)),
                       lambda t: t.sub_(torch.arange(float(t.numel()), device=t.device).view(t.shape))])


@pytest.mark.parametrize("seed", range(100))
def test_random_chains(seed):
    rng = random.Random(seed)
    shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
    base = torch.arange(float(np.prod(shape))).view(shape)
    device = base.to("tpu")
    cpu_view, tpu_view = base, device
    for _ in range(rng.randint(1, 4)):
        step = _steps(rng, cpu_view)
        cpu_view, tpu_view = step(cpu_view), step(tpu_view)
        assert tpu_view.stride() == cpu_view.stride() and tpu_view.shape == cpu_view.shape
        if rng.random() < 0.4:
            write = _write(rng)
            write(cpu_view), write(tpu_view)
    write = _write(rng)
    write(cpu_view), write(tpu_view)
    torch.testing.assert_close(device.cpu(), base, rtol=0, atol=0)
    torch.testing.assert_close((tpu_view * 1).cpu(), cpu_view, rtol=0, atol=0)
    assert strides(tpu_view * 1) == strides(cpu_view * 1)
