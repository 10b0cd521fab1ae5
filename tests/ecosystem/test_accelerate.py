"""Accelerate's training loop without a device argument, against the same loop on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def train(accelerator, dropout=0.0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(dropout),
                                torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(12, 8), torch.randn(12, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=3))
    losses = []

    def epoch():
        for x, y in loader:
            assert x.device == accelerator.device
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return epoch


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_losses_are_the_cpus(precision, steps):
    want = train(Accelerator(cpu=True, gradient_accumulation_steps=steps))()
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
    assert accelerator.device == torch.device("tpu", 0)
    if precision == "fp16":
        assert accelerator.scaler.is_enabled() and accelerator.scaler._device == "tpu"
    tolerance = {"no": 1e-5, "bf16": 3e-2, "fp16": 0.1}[precision]  # float16: the first steps may overflow
    torch.testing.assert_close(torch.tensor(train(accelerator)()), torch.tensor(want), rtol=tolerance, atol=tolerance)


def test_saved_state_has_the_devices_random_state(tmp_path):
    accelerator = Accelerator()
    epoch = train(accelerator, dropout=0.5)
    epoch()
    accelerator.save_state(tmp_path)
    first = epoch()[4:8]
    drawn = torch.rand(3, device="tpu")
    accelerator.load_state(tmp_path)
    assert epoch()[8:] == first
    assert torch.equal(torch.rand(3, device="tpu"), drawn)


def test_gathering_and_the_tpu_backend_of_torch_compile():
    accelerator = Accelerator(dynamo_backend="tpu")
    x = torch.arange(4, device=accelerator.device)
    assert torch.equal(accelerator.gather(x), x) and torch.equal(accelerator.gather_for_metrics(x), x)
    assert torch.equal(accelerator.reduce(x), x)
    assert all(torch.tensor(train(accelerator)()).isfinite())


def test_accelerate_launch_with_two_processes(tmp_path):
    """Also: accelerate is imported before torch, so that torch_tpu comes while it is half imported."""
    script = tmp_path / "main.py"
    script.write_text("""
import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="fp16")
data = torch.utils.data.TensorDataset(torch.arange(10.0).view(10, 1))
loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))
model = accelerator.prepare(torch.nn.Linear(1, 1))
gathered = torch.cat([accelerator.gather_for_metrics(x) for x, in loader])
accelerator.backward(model(gathered / 10).mean())
assert accelerator.num_processes == 2 and accelerator.device == torch.device("tpu", 0)
assert torch.equal(gathered.cpu(), data.tensors[0])
accelerator.wait_for_everyone()
accelerator.print("DONE")
""")
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run([str(Path(sys.executable).parent / "accelerate"), "launch", "--num_processes", "2",
                           "--main_process_port", "0", str(script)], capture_output=True, text=True, timeout=180,
                          env={**kept, "HF_HOME": str(tmp_path)}, check=False)
    assert done.returncode == 0 and "DONE" in done.stdout, done.stderr[-3000:]
