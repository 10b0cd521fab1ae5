"""Ignite: its loops take the device of torch.accelerator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ignite")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DATA = torch.utils.data.TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),
                                      torch.arange(8) % 3)


def run(device):
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy, Loss

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.cross_entropy, device=device)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(loader, max_epochs=2)
    metrics = {"accuracy": Accuracy(device=device), "loss": Loss(torch.nn.functional.cross_entropy, device=device)}
    found = create_supervised_evaluator(model, metrics, device=device).run(loader).metrics
    return losses, found, {p.device.type for p in model.parameters()}


def test_training_and_metrics():
    losses, metrics, devices = run(torch.accelerator.current_accelerator())
    want, wanted, _ = run(torch.device("cpu"))
    assert devices == {"tpu"}
    assert losses == pytest.approx(want, rel=1e-4) and metrics == pytest.approx(wanted, rel=1e-4)
