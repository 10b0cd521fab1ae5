"""Reading by index."""

from __future__ import annotations

import pytest
import torch

from conftest import compare, compare_grad

pytestmark = pytest.mark.usefixtures("no_fallback")

KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool]


def values(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", KINDS)
def test_index_select_gather_take(dtype):
    rows, cells = torch.tensor([2, 0, 2]), torch.tensor([[0, 3, 1], [2, 2, 0]])
    x = values(4, 3, dtype=dtype)
    compare(lambda x, i: x.index_select(0, i), x, rows)
    compare(lambda x, i: x.gather(0, i), x, cells)
    compare(lambda x, i: torch.take_along_dim(x, i, 0), x, cells)
    compare(lambda x, i: x.take(i), x, cells - 4)


@pytest.mark.parametrize("pick", [
    lambda x, i, j: x[i], lambda x, i, j: x[:, i - 1], lambda x, i, j: x[i, :, j], lambda x, i, j: x[:, i, j],
    lambda x, i, j: x[i[:, None], j], lambda x, i, j: x[None, i, ..., j - 4], lambda x, i, j: x[i.int(), 1:, 2],
    lambda x, i, j: x[i[0]], lambda x, i, j: x[[0, -1], ::2], lambda x, i, j: x[i[:0]],
])
def test_index_forms(pick):
    compare(pick, values(3, 4, 5), torch.tensor([0, 2, 1]), torch.tensor([3, 0, 3]))


@pytest.mark.parametrize("dtype", KINDS)
def test_masks(dtype):
    x = values(3, 4, dtype=dtype)
    mask = torch.tensor([True, False, True])
    compare(lambda x, m: (x[m], x[:, x[0] > 0], x[x > 0], x.masked_select(x > 0), x[m, 1]), x, mask)
    compare(lambda x, m: (x.nonzero(), torch.argwhere(x), x.nonzero(as_tuple=True)), x, mask)


def test_nonzero_static_pads_and_cuts():
    x = torch.tensor([[0, 1, 2], [3, 0, 0]])
    for size in (0, 2, 5):
        compare(lambda x, n=size: torch.nonzero_static(x, size=n, fill_value=-7), x)


def test_masked_fill_and_scatter():
    x = values(3, 4)
    compare(lambda x: x.masked_fill(x > 0, 2.5), x)
    compare(lambda x: x.masked_fill(x[0] > 0, torch.tensor(1.5)), x)
    compare(lambda x: x.masked_scatter(x > 0, x.flatten() * 10), x)
    compare_grad(lambda x, y: x.masked_scatter(x > 0, y) ** 2, x, values(3, 4))


def test_gradients():
    i = torch.tensor([0, 2, 0])
    compare_grad(lambda x, i: x[i] ** 2, values(3, 4), i)
    compare_grad(lambda x, i: x.index_select(1, i) ** 2, values(3, 4), i)
    compare_grad(lambda x, i: x.gather(0, i[None]) ** 2, values(3, 4), i)
    compare_grad(lambda x, i: x.take(i) ** 2, values(3, 4), i)


def test_a_number_of_zero_dimensions():
    zero = torch.tensor([0])
    compare(lambda x, i: (x.index_select(0, i), x.gather(0, i), x.take(i), x[None, ...], x[x > 0]),
            torch.tensor(4.0), zero)


def test_wrong_indices_raise_as_on_the_cpu():
    x = torch.zeros(2, 3, 4, device="tpu")
    for wrong in (lambda: x[0, 0, 0, 0], lambda: x[:, torch.zeros(3, 3, dtype=torch.bool, device="tpu")],
                  lambda: x[:, 7], lambda: x[torch.tensor([7])], lambda: x[torch.tensor([0.5], device="tpu")],
                  lambda: x[torch.tensor([0, 1], device="tpu"), torch.tensor([0, 1, 2], device="tpu")]):
        with pytest.raises(IndexError):
            wrong()
    with pytest.raises(RuntimeError):
        x.gather(0, torch.zeros(5, 5, 5, dtype=torch.int64, device="tpu"))


def test_out_of_range_on_the_device_does_not_crash():
    x = torch.arange(4.0).to("tpu")
    far = torch.tensor([9, -9]).to("tpu")
    assert torch.isin(x[far].cpu(), torch.arange(4.0)).all()
    x[far] = -1.0
    assert x.shape == (4,)


def test_unique_in_every_form():
    x = torch.tensor([[2, 1, 2], [2, 1, 2], [0, 5, 0]])
    for options in ({}, {"return_inverse": True, "return_counts": True}, {"dim": 0, "return_inverse": True},
                    {"dim": 1, "return_counts": True}):
        compare(lambda x, o=options: torch.unique(x, **o), x)
        compare(lambda x, o=options: torch.unique_consecutive(x, **o), x)
    compare(lambda x: torch.unique(x, return_counts=True), torch.tensor([1.0, float("nan"), float("nan"), 1.0]))
    compare(lambda x: torch.unique(x, return_inverse=True), torch.empty(0, 3))


def test_counts_and_repetition():
    i = torch.tensor([3, 1, 1, 0])
    compare(lambda i: (torch.bincount(i), torch.bincount(i, minlength=9), torch.bincount(i, i * 0.5)), i)
    compare(lambda i: (torch.repeat_interleave(i), i.repeat_interleave(i), i.repeat_interleave(2),
                       i.repeat_interleave(i, output_size=5)), i)
    with pytest.raises(RuntimeError):
        torch.repeat_interleave(-i.to("tpu"))


def test_equal_and_allclose():
    x = values(3, 4).to("tpu")
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1) and not torch.equal(x, x[:2])
    assert torch.allclose(x, x + 1e-9) and not torch.allclose(x, x + 1)
