"""Writing by index."""

from __future__ import annotations

import pytest
import torch

from conftest import compare, compare_grad

pytestmark = pytest.mark.usefixtures("no_fallback")

KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def values(*shape, dtype=torch.float32, seed=0):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9 + 1).to(dtype)


CELLS = torch.tensor([[0, 3, 0], [3, 1, 2]])
ROWS = torch.tensor([2, 0, 2])


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("dtype", KINDS)
def test_scatter(dtype):
    x, source = values(4, 3, dtype=dtype), values(5, 4, dtype=dtype, seed=1)
    compare(lambda x, s, i: (x.scatter(0, i[:1], s), x.scatter(0, i, 1), x.scatter_add(0, i, s)), x, source, CELLS)
    compare(lambda x, s, i: (x.scatter(0, i, s, reduce="add"), x.scatter(0, i, 2, reduce="multiply")),
            x, source, CELLS)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(reduce, include):
    for dtype in KINDS:
        compare(lambda x, s, i: x.scatter_reduce(0, i, s, reduce, include_self=include),
                values(4, 3, dtype=dtype), values(2, 3, dtype=dtype, seed=1), CELLS, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_index_reduce(reduce):
    compare(lambda x, s, i: x.index_reduce(0, i, s, reduce), values(4, 3), values(3, 3, seed=1), ROWS)


@pytest.mark.parametrize("dtype", [*KINDS, torch.bool])
def test_along_a_dimension(dtype):
    x, source = values(4, 3, dtype=dtype), values(3, 3, dtype=dtype, seed=1)
    compare(lambda x, s, i: (x.index_copy(0, i[:2], s[:2]), x.index_add(0, i, s), x.index_fill(1, i, 1)),
            x, source, ROWS)
    compare(lambda x, s, i: x.put(i - 5, s[0], accumulate=True), x, source, ROWS)


def test_index_add_scales():
    compare(lambda x, s, i: (x.index_add(0, i, s, alpha=2), x.index_add(-1, i, s.mT, alpha=-0.5)),
            values(3, 3), values(3, 3, seed=1), ROWS)


def test_index_put_forms():
    x = values(3, 4, 5)

    def write(x, i):
        x[i[:2]] = 1
        x[:, i] += x[:, i] * 2
        x[i, :, i] = torch.arange(4.0, device=x.device)
        x[1, i.int(), 2:] = x[0, :3, 2:].clone()
        x.index_put_((i, i), x[0, 0].clone(), accumulate=True)
        x.index_put_((i - 3,), torch.tensor(2.0, device=x.device))
        return x

    compare(write, x, torch.tensor([2, 0, 2]))


def test_masked_writes():
    def write(x):
        x[x > 5] = -1
        x[:, x[0] < 0] = torch.arange(float(x.shape[0]), device=x.device)[:, None]
        x[x == -1] = torch.arange(float((x == -1).sum()), device=x.device)
        x[torch.tensor([True, False, True], device=x.device), 1:] *= 2
        return x

    compare(write, values(3, 4))


def test_zero_dimensions():
    compare(lambda x, i: (x.scatter(0, i, 2.0), x.index_add(0, i, x), x.index_fill(0, i, 3), x.put(i, x)),
            torch.tensor(4.0), torch.tensor([0]))


def test_gradients():
    compare_grad(lambda x, s, i: x.scatter_add(0, i, s) ** 2, values(4, 3), values(2, 3, seed=1), CELLS)
    compare_grad(lambda x, s, i: x.scatter(0, i[:1], s[:1]) ** 2, values(4, 3), values(2, 3, seed=1), CELLS)
    compare_grad(lambda x, s, i: x.index_add(0, i, s) ** 2, values(4, 3), values(3, 3, seed=1), ROWS)
    compare_grad(lambda x, s, i: x.scatter_reduce(0, i, s, "amax") ** 2, values(4, 3), values(2, 3, seed=1), CELLS)
    compare_grad(lambda x, s, i: x.index_put((i[:2],), s[:2]) ** 2, values(4, 3), values(3, 3, seed=1), ROWS)


def test_values_that_do_not_fit():
    x = torch.zeros(2, 3, device="tpu")
    with pytest.raises(RuntimeError, match="shape mismatch: value tensor of shape"):
        x[torch.tensor([0, 1], device="tpu")] = torch.ones(5, device="tpu")


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segments(reduce):
    lengths = torch.tensor([2, 0, 3, 1])
    compare(lambda x, n: torch.segment_reduce(x, reduce, lengths=n), values(6, 2), lengths)
    compare_grad(lambda x, n: torch.segment_reduce(x, reduce, lengths=n, initial=1.0, unsafe=True) ** 2,
                 values(6, 2), lengths)
