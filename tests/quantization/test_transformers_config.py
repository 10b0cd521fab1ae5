"""TpuQuantConfig in from_pretrained: as torch_tpu.quantize on the loaded model; saved and loaded again."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import torch_tpu
from torch_tpu import quantization

GENERATE = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
TOKENS = torch.tensor([[1, 5, 9, 3]])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path_factory):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=None, pad_token_id=0, attention_bias=True,
        tie_word_embeddings=request.param))
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


def load(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, device_map="tpu", dtype=torch.float32, **settings).eval()


@pytest.mark.parametrize(("mode", "embeddings"), [("int8", False), ("int8", True), ("int8_dynamic", False),
                                                  ("int4", True)])
def test_load_save_load(checkpoint, mode, embeddings, tmp_path, recwarn):
    config = torch_tpu.TpuQuantConfig(mode, group_size=32, embeddings=embeddings)
    model = load(checkpoint, quantization_config=config)
    plain = torch_tpu.quantize(load(checkpoint), mode, group_size=32, embeddings=embeddings)
    want, got = plain.state_dict(), model.state_dict()
    assert want.keys() == got.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].device.type == "tpu"
        assert torch.equal(got[name], want[name]), name
    tokens = TOKENS.to("tpu")
    text = model.generate(tokens, **GENERATE)
    assert torch.equal(text, plain.generate(tokens, **GENERATE))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "tpu" and saved["mode"] == mode
    again = load(tmp_path)
    shares = again.lm_head.weight is again.model.embed_tokens.weight
    assert shares == (embeddings and plain.config.tie_word_embeddings)
    for name, value in again.state_dict().items():
        assert torch.equal(value, want[name]), name
    assert torch.equal(again.generate(tokens, **GENERATE), text)
    assert not [w for w in recwarn if "torch_tpu" in str(w.message)]


def test_as_a_dict_with_skip(checkpoint):
    model = load(checkpoint, quantization_config={"quant_method": "tpu", "mode": "int4", "group_size": 32,
                                                  "skip": ["lm_head", "self_attn"]})
    assert type(model.lm_head) is torch.nn.Linear and type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is quantization.Int4Linear
    assert model.dequantize() is model and not quantization.is_quantized(model)
    assert not hasattr(model.config, "quantization_config")


def test_a_wrong_mode():
    with pytest.raises(ValueError, match="unknown mode 'int2'"):
        torch_tpu.TpuQuantConfig("int2")
