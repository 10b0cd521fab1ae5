"""Kernels of the Hub in Transformers: where its version and that of `kernels` fit (5.20 to 5.22 with kernels 0.17), and
what is said where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("kernels", reason="the extra [kernels] is not installed")
pytest.importorskip("transformers")

from transformers import KernelConfig, LlamaConfig, LlamaForCausalLM

from torch_tpu.integrations import kernels as integration

NORM = Path(__file__).parent / "hub" / "rms-norm"
fitting = pytest.mark.skipif(bool(integration.versions()), reason=integration.versions() or "-")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=100)
    return LlamaForCausalLM(config).eval()


@pytest.mark.skipif(not integration.versions(), reason="the versions fit")
def test_versions_that_do_not_fit_are_named(model):
    with pytest.raises(ValueError, match=r"kernels [\d.]+ is installed and Transformers [\d.]+ takes .*pip install"):
        model.to("tpu").set_use_kernels(True)


@fitting
def test_use_kernels_without_a_mapping_says_so(model):
    with pytest.warns(UserWarning, match="changed no layer of LlamaForCausalLM"):
        model.to("tpu").set_use_kernels(True)


@fitting
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_a_kernel(model, cache):
    tokens = torch.tensor([[1, 2, 3, 4]])
    settings = dict(max_new_tokens=8, do_sample=False, cache_implementation=None if cache == "dynamic" else cache)
    wanted = model.generate(tokens, **settings)
    model.to("tpu").set_use_kernels(True, KernelConfig({"RMSNorm": {"tpu": f"{NORM}:RMSNorm"}}, use_local_kernel=True))
    assert model.model.norm.forward.__func__.__module__ == "_rms_norm_tpu_1.layers"
    assert torch.equal(model.generate(tokens.to("tpu"), **settings).cpu(), wanted)


@fitting
def test_training_with_a_kernel(model):
    tokens = torch.randint(0, 100, (2, 8))
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.to("tpu").set_use_kernels(True, KernelConfig({"RMSNorm": {"tpu": f"{NORM}:RMSNorm"}}, use_local_kernel=True))
    model(input_ids=tokens.to("tpu"), labels=tokens.to("tpu")).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), wanted[name], rtol=1e-3, atol=1e-5)
