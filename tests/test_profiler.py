"""torch.profiler sees the operators of the device; torch.tpu.profiler writes traces with the names of modules."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function


def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("tpu")


def events(folder):
    files = [*folder.glob("plugins/profile/*/*.trace.json.gz")]
    assert len(files) == 1 and len([*folder.glob("plugins/profile/*/*.xplane.pb")]) == 1
    with gzip.open(files[0]) as opened:
        return [event for event in json.load(opened)["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.parametrize("activities", [None, [ProfilerActivity.CPU]])
def test_torchs_profiler_names_operators(activities, tmp_path):
    x, net = torch.randn(3, 8, device="tpu"), model()
    net(x)  # the first call also asks PyTorch for the results' shapes, on meta tensors
    with profile(activities=activities, record_shapes=True) as profiled, record_function("mine"):
        net(x)
    seen = {entry.key: entry.count for entry in profiled.key_averages()}
    assert seen["aten::addmm"] == 2 and seen["aten::relu"] == 1 and seen["mine"] == 1
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "aten::addmm" in (tmp_path / "trace.json").read_text()


def test_a_trace_has_modules_around_their_programs(tmp_path):
    x, net = torch.randn(3, 8, device="tpu"), model()
    net(x)
    with torch.tpu.profiler.trace(tmp_path) as folder:
        assert folder == tmp_path
        net(x)
    found = events(tmp_path)
    named = {event["name"]: event for event in found}
    assert {"Sequential", "Sequential.0", "Sequential.1", "Sequential.2"} <= {*named}
    outer, inner = named["Sequential"], named["Sequential.2"]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
    assert any("hlo_module" in event.get("args", {}) for event in found)  # programs of the device
    before = len([*tmp_path.rglob("*")])
    net(x)  # nothing is left behind
    assert len([*tmp_path.rglob("*")]) == before


def test_a_compiled_model_is_traced_by_its_program(tmp_path, recwarn):
    x, net = torch.randn(3, 8, device="tpu"), torch.compile(model(), backend="tpu")
    want = net(x)
    with torch.tpu.profiler.trace(tmp_path):
        assert torch.equal(net(x), want)
    assert not [w for w in recwarn if "hooks" in str(w.message)]
    assert any("hlo_op" in event.get("args", {}) for event in events(tmp_path))


def test_an_error_inside_ends_the_trace(tmp_path):
    net = model()
    with pytest.raises(RuntimeError, match="reduction dim"), torch.tpu.profiler.trace(tmp_path / "a"):
        net(torch.randn(3, 5, device="tpu"))
    with torch.tpu.profiler.trace(tmp_path / "b"):
        net(torch.randn(3, 8, device="tpu"))
        with pytest.raises(RuntimeError, match="being recorded already"), torch.tpu.profiler.trace(tmp_path / "c"):
            pass
    assert any(event["name"] == "Sequential.0" for event in events(tmp_path / "b"))
