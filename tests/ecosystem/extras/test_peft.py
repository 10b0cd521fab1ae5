"""PEFT: an adapter is trained on the chip with the CPU's losses, saved, loaded, and merged."""

from __future__ import annotations

import pytest
import torch
from tiny import ids, llama

peft = pytest.importorskip("peft")


def adapted(**settings):
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(llama(), config)


def train(model, device):
    model.to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x, losses = ids(2, 8).to(device), []
    for _ in range(4):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}], ids=lambda s: [*s, "lora"][0])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_losses_are_the_cpus(settings):
    model = adapted(**settings)
    got = train(model, "tpu")
    assert {p.device.type for p in model.parameters()} == {"tpu"}
    torch.testing.assert_close(got, train(adapted(**settings), "cpu"), rtol=1e-4, atol=1e-4)
    assert got[-1] < got[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_saved_loaded_and_merged(tmp_path):
    model, x = adapted(), ids(2, 8).to("tpu")
    train(model, "tpu")
    model.save_pretrained(tmp_path)
    trained = model(input_ids=x).logits
    with model.disable_adapter():
        assert not torch.allclose(model(input_ids=x).logits, trained)
    loaded = peft.PeftModel.from_pretrained(llama().to("tpu"), tmp_path)
    assert {p.device.type for p in loaded.parameters()} == {"tpu"}
    assert torch.equal(loaded(input_ids=x).logits, trained)
    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(input_ids=x).logits, trained, rtol=1e-4, atol=1e-4)
    on_the_cpu = peft.PeftModel.from_pretrained(llama(), tmp_path)
    torch.testing.assert_close(on_the_cpu(input_ids=x.cpu()).logits, trained.cpu(), rtol=1e-4, atol=1e-4)
