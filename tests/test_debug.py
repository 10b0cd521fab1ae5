"""TORCH_TPU_DEBUG=1: synchronous execution with index bounds checks."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch
import torch.nn.functional as F
w = torch.randn(4, 3).to("tpu")
bad = torch.tensor([0, 9]).to("tpu")
wrong = {
    "embedding": lambda: F.embedding(bad, w), "index": lambda: w[bad], "gather": lambda: w.gather(0, bad[:, None]),
    "index_select": lambda: w.index_select(0, bad), "scatter": lambda: w.scatter(0, bad[:, None], 1.0),
    "take": lambda: w.take(bad * 9), "index_add": lambda: w.index_add(0, bad, w[:2]),
    "nll_loss": lambda: F.nll_loss(w[:2], bad), "index_copy": lambda: w.index_copy(0, bad, w[:2]),
}
for name, f in wrong.items():
    try:
        f()
    except (IndexError, RuntimeError) as error:
        assert "out of" in str(error), (name, error)
    else:
        raise AssertionError(f"{name} did not raise")
good = torch.tensor([0, 3]).to("tpu")
assert torch.equal(F.embedding(good, w).cpu(), w.cpu()[[0, 3]])
ignored = torch.tensor([1, -100]).to("tpu")
assert F.nll_loss(w[:2], ignored).isfinite().item()
print("all raised")
"""


def test_indices_out_of_range_raise():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300,
                         env=dict(os.environ, TORCH_TPU_DEBUG="1"))
    assert run.returncode == 0 and "all raised" in run.stdout, run.stdout + run.stderr[-2000:]
