"""timm: a residual network and a vision transformer, forward and a training step."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision_import  # noqa: F401

timm = pytest.importorskip("timm")


@pytest.mark.parametrize(("name", "options"), [("resnet18", {}), ("vit_tiny_patch16_224", {"img_size": 64})])
def test_forward_and_a_training_step(name, options):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options)
    x = torch.randn(4, 3, 64, 64)
    seen = []
    for device in ("cpu", "tpu"):
        trained = copy.deepcopy(model).to(device)
        with torch.no_grad():
            out = trained.eval()(x.to(device))
        assert out.device.type == device
        optimizer = torch.optim.SGD(trained.train().parameters(), lr=0.01)
        losses = []
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(trained(x.to(device)), torch.tensor([1, 3, 0, 4], device=device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seen.append((out.cpu(), torch.tensor(losses), trained.eval()(x.to(device)).detach().cpu()))
    for got, want in zip(seen[1], seen[0]):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
