"""Why something was compiled: TORCH_TPU_LOGS, the warning after many recompilations, torch.tpu.explain(), dumps."""

import warnings

import pytest
import torch

import torch_tpu.compile.causes as causes


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    causes.reset()
    torch.tpu.compiler.reset()
    yield
    torch._dynamo.reset()


def f(x, scale):
    return (x * scale).sum(-1)


def test_a_first_call_and_a_new_size(capfd, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_LOGS", "recompile")
    g = torch.compile(f, backend="tpu")
    for n in (3, 4, 5, 5):
        g(torch.ones(n, 2, device="tpu"), 2.0)
    first, second, third = torch.tpu.compiler.stats().graphs
    assert first.cause == "first call"
    assert "L['x']: float32[3, 2] -> float32[" in second.cause
    assert third.cause == "L['x'].size()[0]: 4 -> 5"
    lines = [line for line in capfd.readouterr().err.splitlines() if "again" in line]
    assert len(lines) == 2 and "for the 2th time" in lines[0] and "4 -> 5" in lines[1]
    table = torch.tpu.explain()
    assert "first call" in table and "L['x'].size()[0]: 4 -> 5" in table and table.count("\n") == 4


def test_dtypes_gradients_and_globals():
    g = torch.compile(f, backend="tpu", dynamic=False)
    g(torch.ones(3, 2, device="tpu"), 2.0)
    g(torch.ones(3, 2, device="tpu", dtype=torch.bfloat16), 2.0)
    g(torch.ones(3, 2, device="tpu", requires_grad=True), 2.0)
    with torch.no_grad():
        g(torch.ones(3, 2, device="tpu"), 2.0)
    found = [record.cause for record in torch.tpu.compiler.stats().graphs]
    assert "L['x']: float32[3, 2] -> bfloat16[3, 2]" in found[1]
    assert any("float32[3, 2] -> float32[3, 2] requiring a gradient" in cause for cause in found[2:])


def test_many_recompilations_warn_once_with_the_culprit():
    g = torch.compile(f, backend="tpu", dynamic=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(3, 15):
            g(torch.ones(n, 2, device="tpu"), 2.0)
    said = [str(w.message) for w in caught if "was compiled" in str(w.message)]
    assert len(said) == 1 and "L['x'].size()[0]" in said[0] and "drop_last" in said[0], said


def test_dump(tmp_path):
    torch.tpu.compiler.dump(tmp_path)
    try:
        torch.compile(lambda x: x.sin().cos(), backend="tpu", options={"name": "waves"})(torch.ones(5, device="tpu"))
    finally:
        torch.tpu.compiler.dump(None)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000-waves.fx.txt", "000-waves.hlo.txt", "000-waves.stablehlo.mlir"]
    for name, word in zip(names, ("aten.cos.default", "HloModule", "stablehlo.sine")):
        assert word in (tmp_path / name).read_text()
