"""torch-tpu bench: that it runs and says what went wrong; how fast is no test's business."""

import json

import pytest

from torch_tpu import bench, cli

RATES = {"transfer": ["to_device", "to_host"], "hbm": ["read_and_write"], "products": ["bfloat16", "float32"],
         "dispatch": ["operator", "round_trip"], "decode": ["tokens_s", "first_call_s", "parameters"]}


def test_all_figures(capsys):
    pytest.importorskip("transformers")
    assert cli.main(["bench", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == [] and found["chips"] >= 1 and set(found["versions"]) == {"python", "torch", "jax"}
    for part, names in RATES.items():
        assert sorted(found[part]) == sorted(names) and all(found[part][name] > 0 for name in names), part
    page = bench.text(found)
    assert len(page.splitlines()) < 24 and "everything ran" in page and "tokens/s" in page
    assert all(len(line) <= 140 for line in page.splitlines())


def test_what_fails_is_said(monkeypatch, capsys):
    def broken(quick):
        raise RuntimeError("the chip is on fire")

    for name in ("_transfer", "_hbm", "_dispatch", "_decode"):
        monkeypatch.setattr(bench, name, lambda quick: {})
    monkeypatch.setattr(bench, "_products", broken)
    assert cli.main(["bench", "--quick"]) == 1
    assert "problem: products: RuntimeError: the chip is on fire" in capsys.readouterr().out


def test_wrong_numbers_are_a_problem(monkeypatch):
    for name in ("_transfer", "_hbm", "_dispatch", "_decode"):
        monkeypatch.setattr(bench, name, lambda quick: {})
    monkeypatch.setattr(bench, "_products", lambda quick: {"bfloat16": 1.0, "float32": 1.0, "wrong": 0.5})
    assert bench.measure(True)["problems"] == ["products: results differ from the CPU's by more than 2 %"]


def test_peaks_of_chips():
    assert bench._peaks("TPU v5 lite")["flops"] == 197e12 and bench._peaks("TPU v5p")["flops"] == 459e12
    assert bench._peaks("TPU v6 lite")["hbm"] == 1640e9 and bench._peaks("a new chip") == {}
