"""Embeddings and bags of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

pytestmark = pytest.mark.usefixtures("no_fallback")

TABLE = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[1, 2, 6], [2, 0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward(dtype):
    compare(lambda w, i: (F.embedding(i, w), F.embedding(i.int(), w), F.embedding(i[0, 0], w)), TABLE.to(dtype), IDS)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
def test_gradient(options):
    compare_grad(lambda w, i: F.embedding(i, w, **options) ** 2, TABLE, IDS)


def test_max_norm_changes_the_table():
    compare(lambda w, i: (F.embedding(i, w, max_norm=1.0), w), TABLE, IDS)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"include_last_offset": True}])
def test_bags(mode, options):
    ids, offsets = torch.tensor([0, 3, 2, 2, 6, 5, 1]), torch.tensor([0, 2, 2, 7])
    compare(lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, **options), TABLE, ids, offsets)
    compare_grad(lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, **options) ** 2, TABLE, ids, offsets)


def test_weighted_bags():
    compare_grad(lambda w, i, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s) ** 2, TABLE, IDS,
                 torch.rand(2, 3, generator=torch.Generator().manual_seed(1)))
