"""Products of few rows of bfloat16 are padded to a tile of the matrix unit on TPU chips; here where it is asked for."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from pathlib import Path

torch.manual_seed(0)
weight, bias = torch.randn(24, 16).bfloat16(), torch.randn(24).bfloat16()
rows = torch.randn({rows}, 16).bfloat16()
torch.tpu.compiler.dump({folder!r})
with torch.no_grad():
    got = torch.compile(torch.nn.functional.linear, backend="tpu")(rows.to("tpu"), weight.to("tpu"), bias.to("tpu"))
    eager = torch.nn.functional.linear(rows.to("tpu"), weight.to("tpu"), bias.to("tpu"))
expected = torch.nn.functional.linear(rows, weight, bias)
for each in (got, eager):
    assert each.shape == expected.shape
    torch.testing.assert_close(each.cpu(), expected, rtol=2e-2, atol=2e-2)
print("padded" if "tensor<8x16xbf16>" in next(Path({folder!r}).glob("*.stablehlo.mlir")).read_text() else "as it is")
"""


@pytest.mark.parametrize("setting, rows, padded", [("8", 1, True), ("8", 3, True), ("8", 9, False), ("auto", 1, False)])
def test_padding(setting, rows, padded, tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(rows=rows, folder=str(tmp_path))], capture_output=True,
                          text=True, timeout=300, env={**os.environ, "TORCH_TPU_MATMUL_ROWS": setting})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("padded" if padded else "as it is")


def test_the_last_row_of_many_is_not_padded(tmp_path):
    code = """
import torch
from pathlib import Path

a, b = torch.randn(128, 16).bfloat16(), torch.randn(16, 16).bfloat16()
torch.tpu.compiler.dump({folder!r})
step = torch.compile(lambda a, b: (a @ b)[-1:] @ b, backend="tpu")
torch.testing.assert_close(step(a.to("tpu"), b.to("tpu")).cpu(), (a @ b)[-1:] @ b, rtol=2e-2, atol=2e-2)
assert "tensor<8x16xbf16>" not in next(Path({folder!r}).glob("*.stablehlo.mlir")).read_text()
"""
    done = subprocess.run([sys.executable, "-c", code.format(folder=str(tmp_path))], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "TORCH_TPU_MATMUL_ROWS": "8"})
    assert done.returncode == 0, done.stderr


def test_a_wrong_setting_is_an_error():
    done = subprocess.run([sys.executable, "-c", "import torch; torch.ones(2, device='tpu')"], capture_output=True,
                          text=True, timeout=300, env={**os.environ, "TORCH_TPU_MATMUL_ROWS": "many"})
    assert done.returncode != 0 and "TORCH_TPU_MATMUL_ROWS='many' must be a whole number" in done.stderr
