"""Weights in files of safetensors and GGUF go to the chip, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from tiny import CONFIG, ids, llama
from transformers import AutoModelForCausalLM

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn)


def test_safetensors(tmp_path):
    tensors = {str(dtype): torch.randn(5, 3).mul(4).to(dtype) for dtype in DTYPES}
    file = tmp_path / "x.safetensors"
    save_file({name: tensor.to("tpu") for name, tensor in tensors.items()}, file)
    loaded = load_file(file, device="tpu")
    with safe_open(file, framework="pt", device="tpu") as opened:
        for name, tensor in tensors.items():
            assert loaded[name].device.type == "tpu" and loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name].cpu().view(torch.uint8), tensor.view(torch.uint8))
            assert torch.equal(opened.get_tensor(name).cpu().view(torch.uint8), tensor.view(torch.uint8))
            assert torch.equal(opened.get_slice(name)[1:3].cpu().view(torch.uint8), tensor[1:3].view(torch.uint8))


def test_a_module_with_tied_weights(tmp_path):
    def module():
        made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        made[1].weight = made[0].weight
        return made

    saved, loaded = module().to("tpu"), module().to("tpu")
    save_model(saved, tmp_path / "tied.safetensors")
    load_model(loaded, tmp_path / "tied.safetensors", device="tpu")
    assert torch.equal(loaded[1].weight, saved[0].weight) and loaded[1].weight is loaded[0].weight


def test_a_model_in_several_files(tmp_path):
    model = llama().to("tpu")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map="tpu")
    for name, value in loaded.state_dict().items():
        assert value.device.type == "tpu" and torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_gguf(tmp_path, kind):
    """A file as llama.cpp's converter writes it, of a model made here."""
    gguf = pytest.importorskip("gguf")
    model = llama()
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    heads, layers = CONFIG["num_attention_heads"], CONFIG["num_hidden_layers"]
    for add, value in ((writer.add_block_count, layers), (writer.add_context_length, 128),
                       (writer.add_embedding_length, CONFIG["hidden_size"]), (writer.add_vocab_size, 96),
                       (writer.add_feed_forward_length, CONFIG["intermediate_size"]), (writer.add_head_count, heads),
                       (writer.add_head_count_kv, CONFIG["num_key_value_heads"]), (writer.add_rope_freq_base, 1e4),
                       (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_dimension_count, 8)):
        add(value)
    for name, value in model.state_dict().items():
        middle = name.removeprefix("model.layers.").removesuffix(".weight")
        number, _, part = middle.partition(".")
        new = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm",
               "lm_head.weight": "output"}.get(name) or f"blk.{number}.{parts[part]}"
        if part.endswith(("q_proj", "k_proj")):  # llama.cpp's order of the rotary halves
            count = heads if part.endswith("q_proj") else CONFIG["num_key_value_heads"]
            value = value.view(count, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        array = value.numpy().astype(np.float32)
        stored = gguf.GGMLQuantizationType[kind if array.ndim == 2 and array.shape[-1] % 32 == 0 else "F32"]
        writer.add_tensor(f"{new}.weight", gguf.quantize(array, stored), raw_dtype=stored)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, device_map=to)
              for to in ("cpu", "tpu")]
    for name, value in loaded[1].state_dict().items():
        assert value.device.type == "tpu" and torch.equal(value.cpu(), loaded[0].state_dict()[name]), name
    got = loaded[1](ids(1, 6).to("tpu")).logits.cpu()
    torch.testing.assert_close(got, loaded[0](ids(1, 6)).logits, rtol=1e-4, atol=1e-4)
    if kind == "F32":
        torch.testing.assert_close(got, model(ids(1, 6)).logits, rtol=1e-4, atol=1e-4)
