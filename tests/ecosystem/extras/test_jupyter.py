"""A notebook that uses the device shows what the same notebook shows with the CPU, and nothing else."""

from __future__ import annotations

import os

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CELLS = ["""
import torch
torch.set_default_device("tpu")
x = torch.arange(3.0)
x + 1""", """
from tqdm.auto import tqdm
for step in tqdm(range(3), desc="steps"):
    x = x * 2
x.sum().item()""", """
model = torch.compile(torch.nn.Linear(3, 2), backend="tpu")
model(x).shape""", """
!echo from a process""", """
torch.ones(2) @ torch.ones(3)"""]


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_without_noise(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setenv("TPU_STDERR_LOG_LEVEL", os.environ.get("TPU_STDERR_LOG_LEVEL", "0"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True)
    client.execute()
    shown = [cell.outputs for cell in notebook.cells]
    noise = [out["text"] for outputs in shown for out in outputs if out.output_type == "stream" and "steps" not in
             out["text"] and "from a process" not in out["text"]]
    assert not noise
    assert shown[0][0]["data"]["text/plain"] == "tensor([1., 2., 3.], device='tpu:0')"
    bar, result = shown[1]
    assert "steps" in str(bar) and result["data"]["text/plain"] == "24.0"
    assert shown[2][-1]["data"]["text/plain"] == "torch.Size([2])"
    assert [out["text"].strip() for out in shown[3]] == ["from a process"]
    assert shown[4][-1]["ename"] == "RuntimeError" and "size" in shown[4][-1]["evalue"]
