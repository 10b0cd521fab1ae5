"""script/soak.py in short: it finds steady memory steady, and growth growing."""

from __future__ import annotations

import importlib.util
import mmap
import sys

import pytest
import torch
from recipes import ROOT

from processes import python

pytestmark = pytest.mark.usefixtures("no_fallback")


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", ROOT / "script" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_is_steady(compiled):
    # In a process of its own: one that has run hundreds of tests takes and gives back memory as it likes.
    finished = python(f"""
        import sys
        sys.path.insert(0, {str(ROOT / "script")!r})
        import soak
        sys.exit(0 if soak.soak("training", soak.training({compiled}), 60, 20, 16 << 20) else 1)
    """, TORCH_TPU_FALLBACK="error")
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_generation_is_steady(soak, static):
    assert soak.soak("generation", soak.generation(static), 40, 10, 16 << 20)


def test_a_kept_tensor_is_seen(soak, capsys):
    kept = []
    leak = lambda index: kept.append(torch.full((4,), float(index), device="tpu"))  # noqa: E731
    assert not soak.soak("leak", leak, 40, 10, 1 << 30)
    assert "GREW: buffers" in capsys.readouterr().out


def test_host_memory_is_seen(soak, capsys):
    kept = []

    def leak(index):  # pages of its own: malloc would take them from what earlier tests gave back
        kept.append(mmap.mmap(-1, 1 << 20))
        kept[-1].write(bytes([index % 255 + 1]) * (1 << 20))

    assert not soak.soak("leak", leak, 40, 10, 16 << 20)
    assert "GREW: RSS" in capsys.readouterr().out


def test_exit_code(soak, monkeypatch):
    def leaks(compiled):
        kept = []
        return lambda index: kept.append(torch.full((4,), float(index), device="tpu"))

    monkeypatch.setattr(soak, "training", leaks)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--steps", "40", "--calls", "0"])
    assert soak.main() == 1
