"""torch_tpu.quantize on models: accuracy, memory, compilation, state dicts, what cannot be quantized."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_tpu
from torch_tpu import quantization

MODES = ("int8", "int8_dynamic", "int4")
# Largest difference to the floating-point model's results, in standard deviations of these.
ERROR = {"int8": 0.05, "int8_dynamic": 0.06, "int4": 0.4}


class Tied(nn.Module):
    """An embedding, a linear layer, and an output layer that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.middle = nn.Linear(64, 64)
        self.output = nn.Linear(64, 96, bias=False)
        self.output.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.relu(self.middle(self.embed(tokens))))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1040), nn.GELU(), nn.Linear(1040, 130)).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_results(mode, dtype, no_fallback):
    model, x = network(dtype), torch.randn(3, 2, 256, dtype=dtype)
    with torch.no_grad():
        floats = model(x)
        on_chip = torch_tpu.quantize(copy.deepcopy(model).to("tpu"), mode)
        on_cpu = torch_tpu.quantize(model, mode)
        for mine, theirs in zip((on_chip[0], on_chip[2]), (on_cpu[0], on_cpu[2])):
            step = float(theirs.weight_scale.max())  # a weight between two integers goes to the one or the other
            torch.testing.assert_close(mine.floats().cpu(), theirs.floats(), rtol=1e-2, atol=1.01 * step)
        on_cpu.load_state_dict(on_chip.state_dict())
        got, want = on_chip(x.to("tpu")), on_cpu(x)
        compiled = torch.compile(on_chip, backend="tpu", fullgraph=True)(x.to("tpu"))
    assert quantization.is_quantized(on_chip) and got.dtype == dtype
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    if mode != "int8_dynamic":  # a step of an activation more or less shows in every output
        torch.testing.assert_close(got.cpu(), want, **close)
    for result in (want, got.cpu(), compiled.cpu()):
        assert (result - floats).abs().max() < ERROR[mode] * floats.std()


@pytest.mark.parametrize(("mode", "bits"), [("int8", 8), ("int8_dynamic", 8), ("int4", 4)])
def test_memory(mode, bits):
    before = torch.tpu.memory_allocated()
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False, device="tpu", dtype=torch.bfloat16) for _ in range(4)])
    held = torch.tpu.memory_allocated() - before
    torch_tpu.quantize(model, mode, group_size=128)
    quantized = torch.tpu.memory_allocated() - before
    assert held == 8 * 2**20
    assert quantized <= held * bits / 16 * 1.04


@pytest.mark.parametrize("embeddings", [False, True])
def test_tied_output_layer(embeddings, no_fallback):
    model = Tied().to("tpu")
    tokens = torch.tensor([[1, 2, 3]], device="tpu")
    with torch.no_grad():
        floats = model(tokens)
        torch_tpu.quantize(model, "int4", embeddings=embeddings)
        result = model(tokens)
    assert isinstance(model.middle, quantization.Int4Linear)
    assert isinstance(model.output, quantization.Int8Linear)
    assert (model.output.weight is model.embed.weight) == embeddings
    assert (model.embed.weight.dtype == torch.int8) == embeddings
    assert (result - floats).abs().max() < 0.3 * floats.std()
    quantization.dequantize(model)
    assert (model.output.weight is model.embed.weight) == embeddings


@pytest.mark.parametrize("mode", MODES)
def test_state_dict(mode, tmp_path):
    x = torch.randn(4, 256, device="tpu")
    with torch.no_grad():
        model = torch_tpu.quantize(network().to("tpu"), mode)
        want = model(x)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        with torch.device("meta"):
            other = network()
        torch_tpu.quantize(other, mode)
        other.load_state_dict(torch.load(tmp_path / "model.pt", map_location="tpu"), assign=True)
        assert torch.equal(other(x), want)
        assert torch.equal(copy.deepcopy(model)(x), want)
        for each in (model, other):
            quantization.dequantize(each)
            assert type(each[0]) is nn.Linear and not quantization.is_quantized(each)
            torch.testing.assert_close(each(x), want, rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("mode", MODES)
def test_input_has_a_gradient(mode):
    model, x = torch_tpu.quantize(network().to("tpu"), mode), torch.randn(4, 256, device="tpu", requires_grad=True)
    model(x).sum().backward()
    mine = x.grad
    x.grad = None
    quantization.dequantize(model)(x).sum().backward()
    torch.testing.assert_close(mine.cpu(), x.grad.cpu())


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode):
    model = torch_tpu.quantize(network().to("tpu"), mode)
    with torch.no_grad(), torch.autocast("tpu", torch.bfloat16):
        assert model(torch.randn(4, 256, device="tpu")).dtype == torch.bfloat16


def test_mode_int4_falls_to_int8_where_it_does_not_divide():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(96, 64), nn.Linear(64, 63))
    torch_tpu.quantize(model, "int4", group_size=64)
    assert [type(layer).__name__ for layer in model] == ["Int4Linear", "Int8Linear", "Int4Linear"]


def test_skip_and_hooks():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
    seen = []
    model["a"].register_forward_hook(lambda *_: seen.append(1))
    torch_tpu.quantize(model, skip=["b.0"])
    assert [type(m).__name__ for m in (model["a"], *model["b"])] == ["Int8Linear", "Linear", "Int8Linear"]
    model["a"](torch.zeros(1, 8))
    assert seen == [1]
    torch_tpu.quantize(model)  # the layers that are left
    assert type(model["b"][0]) is quantization.Int8Linear


@pytest.mark.parametrize("mask", [False, True])
def test_encoder_of_pytorch(mask, no_fallback):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval().to("tpu")
    x = torch.randn(2, 5, 32, device="tpu")
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool, device="tpu") if mask else None
    with torch.no_grad():
        floats = model(x, src_key_padding_mask=padding)
        result = torch_tpu.quantize(model)(x, src_key_padding_mask=padding)
    assert (result - floats)[:, :3].abs().max() < 0.05


@pytest.mark.parametrize(("model", "arguments", "error", "message"), [
    ("model", {}, TypeError, "expected a torch.nn.Module"),
    (nn.Linear(4, 4), {"mode": "int3"}, ValueError, "unknown mode 'int3'; one of int8"),
    (nn.Linear(4, 4), {"mode": "int4", "group_size": 7}, ValueError, "must be even"),
    (nn.Conv2d(1, 1, 1), {}, ValueError, "Conv2d has no nn.Linear"),
])
def test_errors(model, arguments, error, message):
    with pytest.raises(error, match=message):
        torch_tpu.quantize(model, **arguments)


def test_offloaded_weights():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(network(), execution_device=torch.device("tpu"))
    with pytest.raises(ValueError, match="offloaded by Accelerate"):
        torch_tpu.quantize(model)
