"""Losses and their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

pytestmark = pytest.mark.usefixtures("no_fallback")

GENERATOR = torch.Generator().manual_seed(5)
X, Y = (torch.randn(4, 5, generator=GENERATOR) for _ in range(2))
SIGNS = torch.where(Y > 0, 1.0, -1.0)
P = torch.rand(4, 5, generator=GENERATOR)
CLASSES = torch.tensor([0, 3, 4, 2])
REDUCTIONS = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


@REDUCTIONS
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # kl_div's advice
@pytest.mark.parametrize("fn", [
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    lambda x, y, reduction: F.kl_div(x, y.abs(), reduction=reduction),
    lambda x, y, reduction: F.soft_margin_loss(x, y.detach().sign(), reduction=reduction) + 0 * y.sum(),
    lambda x, y, reduction: F.hinge_embedding_loss(x, y.detach().sign(), reduction=reduction) + 0 * y.sum(),
    lambda x, y, reduction: F.smooth_l1_loss(x, y, beta=0.3, reduction=reduction),
    lambda x, y, reduction: F.gaussian_nll_loss(x, y, torch.ones_like(x), reduction=reduction),
    lambda x, y, reduction: F.poisson_nll_loss(x, y.abs(), reduction=reduction)])
def test_elementwise(fn, reduction):
    compare_grad(lambda x, y: fn(x, y, reduction=reduction), X, Y)


@REDUCTIONS
def test_cross_entropy(reduction):
    weight = torch.rand(5) + 0.5
    compare_grad(lambda x: F.cross_entropy(x, CLASSES.to(x.device), reduction=reduction), X)
    compare_grad(lambda x: F.cross_entropy(x, CLASSES.to(x.device), weight.to(x.device), reduction=reduction,
                                           ignore_index=3, label_smoothing=0.1), X)
    compare_grad(lambda x, p: F.cross_entropy(x, p.softmax(-1), reduction=reduction), X, P)
    image, labels = torch.randn(2, 5, 3, 3), torch.randint(0, 5, (2, 3, 3))
    labels[0, 0, 0] = -100
    compare_grad(lambda x: F.cross_entropy(x, labels.to(x.device), reduction=reduction), image)
    compare_grad(lambda x: F.nll_loss(x, CLASSES.to(x.device), weight.to(x.device), reduction=reduction), X)


def test_all_targets_ignored():
    compare(lambda x, t: F.cross_entropy(x, t), X, torch.full((4,), -100))
    compare(lambda x, t: F.cross_entropy(x[0], t[0]), X, CLASSES)


@REDUCTIONS
def test_binary(reduction):
    weight = torch.rand(5)
    compare_grad(lambda p: F.binary_cross_entropy(p, (Y > 0).float().to(p.device), reduction=reduction), P)
    compare_grad(lambda x: F.binary_cross_entropy_with_logits(
        x, (SIGNS > 0).float().to(x.device), weight.to(x.device), reduction=reduction,
        pos_weight=weight.to(x.device) + 1), X)
    compare(F.binary_cross_entropy, torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]))


@REDUCTIONS
def test_margins(reduction):
    compare_grad(lambda x: F.multi_margin_loss(x, CLASSES.to(x.device), p=2, reduction=reduction), X)
    labels = torch.tensor([[3, 0, -1, 1, 2]] * 4)
    compare_grad(lambda x: F.multilabel_margin_loss(x, labels.to(x.device), reduction=reduction), X)
    compare_grad(lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x), margin=0.2, reduction=reduction), X, Y)
    compare_grad(lambda x, y: F.triplet_margin_loss(x, y, x * y, reduction=reduction), X, Y)
    compare_grad(lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4, device=x.device), reduction=reduction), X, Y)
    compare_grad(lambda x: F.multilabel_soft_margin_loss(x, (SIGNS > 0).float().to(x.device), reduction=reduction), X)


def test_narrow():
    compare(lambda x, t: F.cross_entropy(x, t), X.bfloat16(), CLASSES, rtol=1e-2, atol=1e-2)
    compare(F.mse_loss, X.bfloat16(), Y.bfloat16(), rtol=1e-2, atol=1e-2)
