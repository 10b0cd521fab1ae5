"""einops, torchinfo and torchmetrics on tensors of the device."""

from __future__ import annotations

import pytest
import torch


def test_einops():
    pytest.importorskip("einops")
    from einops import einsum, pack, rearrange, reduce, repeat
    from einops.layers.torch import Rearrange

    def all_of(x):
        return [rearrange(x, "b c h w -> b (h w) c"), reduce(x, "b c h w -> b c", "mean"),
                reduce(x, "b c (h h2) w -> b c h w", "max", h2=2), repeat(x, "b c h w -> b c (h 2) w"),
                einsum(x, x, "b c h w, b c k w -> b h k"), Rearrange("b c (h p) w -> b h p c w", p=2)(x),
                pack([x, x], "b * h w")[0]]

    x = torch.randn(2, 3, 4, 5)
    for got, want in zip(all_of(x.to("tpu")), all_of(x)):
        assert got.device.type == "tpu"
        torch.testing.assert_close(got.cpu(), want)


def test_torchinfo():
    torchinfo = pytest.importorskip("torchinfo")

    def summary(device):
        parts = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 2)
        return torchinfo.summary(torch.nn.Sequential(*parts), input_size=(2, 3, 4, 4), device=device, verbose=0)

    assert str(summary("tpu")) == str(summary("cpu"))
    assert summary("tpu").total_params == 146


def test_torchmetrics():
    import torchvision_import  # noqa: F401

    pytest.importorskip("torchmetrics")
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    logits, labels = torch.randn(16, 3), torch.arange(16) % 3
    for kind in (MulticlassAccuracy, MulticlassConfusionMatrix):
        want, metric = kind(3), kind(3).to("tpu")
        want.update(logits, labels)
        metric.update(logits.to("tpu"), labels.to("tpu"))
        assert metric.compute().device.type == "tpu"
        torch.testing.assert_close(metric.compute().cpu(), want.compute())
