"""`torch-tpu conformance` on a sample of PyTorch's operator tests, as a user runs it, and that it can fail."""

import json
import os
import subprocess
import sys

import pytest

SAMPLE = r"^(add|where|softmax|nn\.functional\.(gelu|linear|layer_norm|embedding|cross_entropy)|sum|sort|cumsum" \
         r"|index_put|gather|matmul|linalg\.svd|cat|as_strided_scatter|masked_select)$"


def run(*arguments, **environment):
    command = [sys.executable, "-c", "import sys; from torch_tpu.cli import main; sys.exit(main())", "conformance"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=540,
                          env={**os.environ, "TORCH_TPU_CACHE": "on", **environment})


def test_a_sample_of_operators(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    done = run("--op", SAMPLE, "--dtype", "float32,int64", "--samples", "2", "--report", str(page),
               "--results", str(results))
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert "| `nn.functional.gelu` | ✓ |  |" in text and "| `add` | ✓ | ✓ |" in text
    data = json.loads(results.read_text())
    assert len(data) == 18 and not any(a["failures"] for e in data.values() for a in e["dtypes"].values())
    for form in ("forward", "gradient", "noncontiguous", "inplace", "out"):
        assert sum(a["passed"].get(form, 0) for e in data.values() for a in e["dtypes"].values()) > 5, form
    assert data["linalg.svd"]["dtypes"]["float32"]["fallbacks"] == {}


def test_it_fails_when_an_operator_is_wrong(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import torch_tpu.lowering as package\n"
        "load = package.load\n"
        "def broken():\n"
        "    load()\n"
        "    from dataclasses import replace\n"
        "    from torch_tpu.lowering.table import TABLE\n"
        "    TABLE['aten.sin.default'] = replace(TABLE['aten.sin.default'], fn=lambda x: x)\n"
        "package.load = broken\n")
    done = run("--op", "^(sin|exp)$", "--dtype", "float32", "--samples", "2", PYTHONPATH=str(tmp_path),
               TORCH_TPU_CACHE="off")
    assert done.returncode == 1 and "sin float32: forward" in done.stdout and "exp float32" not in done.stdout, \
        done.stdout + done.stderr


@pytest.mark.parametrize(("arguments", "says"), [
    (("--op", "^no_such_operator$"), "no operator matches"), (("--dtype", "float33"), "no dtype of torch: float33")])
def test_arguments_that_make_no_sense(arguments, says):
    done = run(*arguments)
    assert done.returncode == 2 and says in done.stderr
