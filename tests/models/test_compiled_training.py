"""Whole compiled training steps (torch.tpu.compile_step) of Transformers models, unmodified, in train mode with their
dropout: the losses of eager mode on the device, which draws the same random numbers."""

from __future__ import annotations

import copy

import pytest
import torch

import families

pytestmark = pytest.mark.usefixtures("no_fallback")


def losses(model, batch, *, compiled: bool, steps: int = 3, save_memory: bool = False):
    model = copy.deepcopy(model).to("tpu").train()
    if save_memory:
        model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torch.tpu.compile_step(step) if compiled else step
    batch = {name: value.to("tpu") for name, value in batch.items()}
    torch.manual_seed(5)
    return [run(batch).item() for _ in range(steps)], run


FAST = ("llama", "vit")


@pytest.mark.parametrize("family", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow)
                                    for f in families.FAMILIES])
def test_losses_equal_eager(family):
    model, batch = families.make(family), families.inputs(family)
    want, _ = losses(model, batch, compiled=False)
    got, step = losses(model, batch, compiled=True)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert step.compiles == 1


@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_gradient_checkpointing(family):
    model, batch = families.make(family), families.inputs(family)
    want, _ = losses(model, batch, compiled=False, save_memory=True)
    got, step = losses(model, batch, compiled=True, save_memory=True)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert step.compiles == 1
