"""Quantized models on the chips of one process. (Several processes: tests/distributed/test_transformers.py.)"""

from __future__ import annotations

import pytest

from processes import python


@pytest.mark.parametrize("first", ["quantize", "shard"])
def test_mesh(first):
    finished = python(f"""
    import torch, torch_tpu
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = torch.tpu.mesh(tp=4)
    ids = torch.tensor([[1, 5, 9, 2]])

    def make():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(
            hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=96)).eval()

    for mode in ("int8", "int8_dynamic", "int4"):
        want = torch_tpu.quantize(make(), mode, group_size=16).generate(ids, max_new_tokens=5, do_sample=False)
        model = make()
        if "{first}" == "quantize":
            torch_tpu.quantize(model, mode, group_size=16)
        mesh.shard(model)
        if "{first}" == "shard":
            torch_tpu.quantize(model, mode, group_size=16)
        got = model.generate(ids.to("tpu"), max_new_tokens=5, do_sample=False, cache_implementation="static")
        assert got.tolist() == want.tolist(), mode
        attention = model.model.layers[0].self_attn
        rows, columns = ("tp", None), (None, "tp")
        if mode == "int4":
            rows, columns = columns, rows
            assert mesh.layout(attention.q_proj.weight_scale) == rows
        assert mesh.layout(attention.q_proj.weight) == rows, mode
        assert mesh.layout(attention.o_proj.weight) == columns, mode
    """, timeout=300, TORCH_TPU_VIRTUAL_CHIPS="4", TORCH_TPU_FALLBACK="error", OMP_WAIT_POLICY="PASSIVE")
    assert finished.returncode == 0, finished.stderr[-4000:]
