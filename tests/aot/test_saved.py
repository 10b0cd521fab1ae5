"""Programs in files: exported, loaded in another process, with the same numbers on virtual chips."""

import pytest
import torch
from torch import nn

from processes import python
from torch_tpu import aot
from torch_tpu.runtime import errors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("hidden", torch.rand(3), persistent=False)

    def forward(self, x, mask=None, *, flag=True):
        h = torch.tanh(self.a(x)) * self.scale
        y = self.b(h) + self.hidden
        return {"y": y if mask is None else y.masked_fill(mask, -1.0), "parts": (h.t(), h[1:], 3, None)}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def check(got, want):
    assert got["parts"][2:] == want["parts"][2:]
    for g, w in zip((got["y"], *got["parts"][:2]), (want["y"], *want["parts"][:2])):
        assert g.device.type == "tpu"
        torch.testing.assert_close(g.cpu(), w.detach(), rtol=1e-5, atol=1e-6)


def test_a_module_round_trips(net, tmp_path):
    x, mask = torch.randn(4, 6), torch.rand(4, 3) > 0.5
    want = net(x, mask)
    path = aot.export(tmp_path / "net.tpu", net, (x, mask))
    assert path.stat().st_size < 60_000
    check(aot.load(path, net)(x.to("tpu"), mask.to("tpu")), want)
    check(aot.load(path, net.to("tpu").state_dict())(x, mask), want)  # `hidden` is in the file


def test_another_process_loads_it(net, tmp_path):
    x = torch.randn(4, 6)
    aot.export(tmp_path / "net.tpu", net, (x,))
    torch.save({"state": net.state_dict(), "x": x, "y": net(x)["y"].detach()}, tmp_path / "data.pt")
    finished = python(f"""
        import torch
        from torch_tpu import aot
        data = torch.load({str(tmp_path / "data.pt")!r})
        program = aot.load({str(tmp_path / "net.tpu")!r}, data["state"])
        torch.testing.assert_close(program(data["x"].to("tpu"))["y"].cpu(), data["y"], rtol=1e-5, atol=1e-6)
        print(torch.tpu.compiler.stats().graphs[-1].cause)
    """)
    assert finished.returncode == 0 and "loaded" in finished.stdout, finished.stderr


def test_writes_in_place_and_random_numbers(tmp_path):
    def step(cache, at, new):
        cache.index_copy_(0, at, new)
        return cache.sum(), torch.rand(4, device="tpu")

    cache = torch.zeros(5, 2, device="tpu")
    at, new = torch.tensor([3], device="tpu"), torch.ones(1, 2, device="tpu")
    program = aot.load(aot.export(tmp_path / "step.tpu", step, (cache, at, new)))
    torch.manual_seed(3)
    total, first = program(cache, at, new)
    assert total.item() == 2 and cache[3].tolist() == [1.0, 1.0] and cache.sum().item() == 2
    assert not torch.equal(first, program(cache, at, new)[1])


def test_programs_of_torch_export(net, tmp_path):
    x = torch.randn(4, 6)
    want = net(x)
    exported = torch.export.export(net, (x,))
    check(aot.load(aot.export(tmp_path / "net.tpu", exported, (x,)), net)(x.to("tpu")), want)
    assert aot.trace(exported, (x,)).arguments


def test_a_decode_step(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, head_dim=8)).eval()
    ids = torch.randint(0, 96, (2, 7))

    def logits(model, ids):
        return model(input_ids=ids, use_cache=False).logits

    want = logits(model, ids)
    model = model.to("tpu")
    got = aot.load(aot.export(tmp_path / "m.tpu", model, {"input_ids": ids, "use_cache": False}), model)(
        input_ids=ids.to("tpu"), use_cache=False)
    torch.testing.assert_close(got["logits"].cpu(), want, rtol=1e-4, atol=1e-5)


def test_wrong_calls(net, tmp_path):
    x = torch.randn(4, 6)
    path = aot.export(tmp_path / "net.tpu", net, (x,), platforms=("tpu",))
    with pytest.raises(ValueError, match="was exported for tpu, this device is cpu"):
        aot.load(path, net)
    path = aot.export(tmp_path / "net.tpu", net, (x,))
    with pytest.raises(ValueError, match=r"needs the weights .*a.weight"):
        aot.load(path)
    program = aot.load(path, net)
    with pytest.raises(TypeError, match="exported for other arguments"):
        program(x, flag=False)
    with pytest.raises(ValueError, match=r"it was exported for torch.float32\[4, 6\]"):
        program(torch.randn(5, 6))
    with pytest.raises(ValueError, match="has shape"):
        aot.load(path, {**net.state_dict(), "a.weight": torch.zeros(8, 7)})(x)
    with pytest.raises(ValueError, match="platform 'gpu'"):
        aot.export(tmp_path / "no.tpu", net, (x,), platforms=("gpu",))
    with pytest.raises(errors.CaptureError):
        aot.export(tmp_path / "no.tpu", lambda x: x * float(x.sum()), (x,))
    outside = torch.ones(6, device="tpu")
    with pytest.raises(errors.CaptureError, match="pass it as an argument"):
        aot.export(tmp_path / "no.tpu", lambda x: x + outside, (x,))
