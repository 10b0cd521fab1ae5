"""Lightning's Trainer and Fabric: on the chip without being told, with the CPU's losses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torchvision_import  # noqa: F401

lightning = pytest.importorskip("lightning")
DATA = torch.utils.data.TensorDataset(*torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1)))
QUIET = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=2)
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers, and its own deprecations


class Regression(lightning.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 4))
        self.losses: list[float] = []
        self.devices: set[str] = set()

    def loss(self, batch):
        self.devices |= {p.device.type for p in self.parameters()} | {t.device.type for t in batch}
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch))

    def predict_step(self, batch, index):
        self.loss(batch)
        return self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader():
    return torch.utils.data.DataLoader(DATA, batch_size=4)


def fit(folder, module=None, resume=None, **arguments):
    module = module or Regression()
    trainer = lightning.Trainer(default_root_dir=folder, **{**QUIET, **arguments})
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return trainer, module


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    trainer, module = fit(tmp_path_factory.mktemp("cpu"), accelerator="cpu")
    return module.losses, trainer.validate(module, loader(), verbose=False)[0]["validation"], trainer


@pytest.mark.parametrize("accelerator", ["auto", "tpu"])
def test_the_trainer_is_on_the_chip(tmp_path, on_the_cpu, accelerator):
    trainer, module = fit(tmp_path, accelerator=accelerator)
    assert module.devices == {"tpu"} and trainer.strategy.root_device == torch.device("tpu", 0)
    assert trainer.num_devices == 1 and trainer.accelerator.get_device_stats("tpu")
    losses, validation, cpu = on_the_cpu
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(losses), rtol=1e-4, atol=1e-5)
    got = trainer.validate(module, loader(), verbose=False)[0]["validation"]
    assert abs(got - validation) < 1e-4
    module.devices.clear()
    predicted, want = trainer.predict(module, loader()), cpu.predict(cpu.lightning_module, loader())
    torch.testing.assert_close(torch.cat(predicted), torch.cat(want), rtol=1e-4, atol=1e-5)
    assert module.devices == {"tpu"}


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_precisions(tmp_path, on_the_cpu, precision):
    trainer, module = fit(tmp_path, precision=precision)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    assert (scaler is not None and scaler.is_enabled()) == (precision == "16-mixed")
    assert module.devices == {"tpu"}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    assert module.losses != on_the_cpu[0]  # it was not float32
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(on_the_cpu[0]), rtol=0.05, atol=0.05)


def test_a_checkpoint_resumes_the_training(tmp_path):
    _, module = fit(tmp_path, max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2)
    first, _ = fit(tmp_path / "first", max_epochs=1, gradient_clip_val=0.5, accumulate_grad_batches=2)
    saved = first.checkpoint_callback.best_model_path
    _, resumed = fit(tmp_path / "second", resume=saved, max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert resumed.losses == module.losses[4:]
    for name, value in module.state_dict().items():
        assert torch.equal(value.cpu(), resumed.state_dict()[name].cpu()), name
    loaded = Regression.load_from_checkpoint(saved, map_location="cpu")
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}


def test_the_sanity_check_does_not_change_the_dropout(tmp_path):
    class Draws(Regression):
        def validation_step(self, batch, index):
            torch.rand(3, device="tpu")

    seen = []
    for steps in (0, 2):
        module = Draws(dropout=0.5)
        torch.manual_seed(7)
        fit(tmp_path, module, num_sanity_val_steps=steps, max_epochs=1)
        seen.append(module.losses)
    assert seen[0] == seen[1]


def test_what_cannot_be_is_said(tmp_path):
    with pytest.raises(ValueError, match="this host has"):
        lightning.Trainer(devices=1000)
    with pytest.raises(ValueError, match="TPU_VISIBLE_CHIPS"):
        lightning.Trainer(devices=[3])
    assert lightning.Trainer(devices=[0]).num_devices == 1
    assert lightning.Trainer(accelerator="cpu").strategy.root_device.type == "cpu"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_fabric(precision):
    from lightning.fabric import Fabric

    losses = []
    for options in ({"accelerator": "cpu"}, {"precision": precision}):
        fabric = Fabric(**options)
        module = Regression()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model, optimizer = fabric.setup(module.layers, optimizer)
        batches = fabric.setup_dataloaders(loader())
        losses.append([])
        for x, y in batches:
            assert x.device == fabric.device == next(model.parameters()).device
            loss = torch.nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert fabric.device == torch.device("tpu", 0)
    tolerance = 1e-5 if precision == "32-true" else 0.05
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=tolerance, atol=tolerance)


def test_under_its_other_name():
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    trainer = pytorch_lightning.Trainer(precision="bf16-mixed", **QUIET)
    assert trainer.strategy.root_device == torch.device("tpu", 0) and trainer.precision_plugin.device == "tpu"


def test_two_processes(tmp_path, on_the_cpu):
    """Lightning starts the second process; averaged gradients of halves are those of the whole."""
    script = tmp_path / "main.py"
    script.write_text("""
import sys
import torch, torchvision_import, lightning
from test_lightning import DATA, QUIET, Regression

if __name__ == "__main__":
    trainer = lightning.Trainer(devices=2, default_root_dir=sys.argv[1], use_distributed_sampler=False,
                                enable_checkpointing=False, **QUIET)
    module = Regression()
    batches = torch.utils.data.BatchSampler(range(trainer.global_rank * 2, 16), 2, False)
    batches = [batch for number, batch in enumerate(batches) if number % 2 == 0]
    trainer.fit(module, torch.utils.data.DataLoader(DATA, batch_sampler=batches))
    assert module.devices == {"tpu"} and trainer.world_size == 2
    assert type(trainer.strategy).__name__ == "DDPStrategy"
    losses = trainer.strategy.reduce(torch.tensor(module.losses, device="tpu"), reduce_op="mean")
    if trainer.global_rank == 0:
        print("LOSSES", losses.tolist())
""")
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "PYTHONPATH": path, "TORCH_TPU_VIRTUAL_CHIPS": "2"}, check=False)
    assert done.returncode == 0 and "LOSSES" in done.stdout, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOSSES"))
    got = [float(word.strip("[],")) for word in line.split()[1:]]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(on_the_cpu[0]), rtol=1e-4, atol=1e-5)
