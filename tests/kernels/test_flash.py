"""The attention kernel of TPU programs: its numbers, interpreted, against CPU PyTorch; that it compiles for chips."""

from __future__ import annotations

import math
import platform
import sys

import pytest
import torch
from torch.nn import functional as F

from torch_tpu import aot
from torch_tpu.lowering import context, flash

on_linux = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                              reason="libtpu is for Linux on x86-64")


@pytest.fixture
def for_tpu(monkeypatch):
    """Programs are those for a TPU, with small blocks, so that there are several."""
    calls = []
    for name in ("forward", "backward"):
        theirs = getattr(flash, name)

        def counted(*args, theirs=theirs, name=name):
            calls.append(name)
            return theirs(*args)

        monkeypatch.setattr(flash, name, counted)
    monkeypatch.setattr(flash, "_ROWS", 64)
    monkeypatch.setattr(flash, "_KEYS", 128)
    monkeypatch.setattr(context, "flash_bytes", lambda: 0)
    with context.targeting("tpu"):
        yield calls


def inputs(query_heads, heads, length, keys, width, width_v=None, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, query_heads, length, width, dtype=dtype), torch.randn(2, heads, keys, width, dtype=dtype),
            torch.randn(2, heads, keys, width_v or width, dtype=dtype)]


def agree(tensors, tolerance, **kwargs):
    """Output and gradients, against CPU PyTorch in float32."""
    results = []
    for place, kind in (("cpu", torch.float32), ("tpu", tensors[0].dtype)):
        leaves = [t.detach().clone().to(place, kind).requires_grad_() for t in tensors]
        mask = kwargs.get("attn_mask")
        out = F.scaled_dot_product_attention(
            *leaves, **{**kwargs, "attn_mask": None if mask is None else mask.to(place)}, enable_gqa=True)
        weight = torch.linspace(-1, 1, out.shape[-1], device=place)
        (out.float() * weight).sum().backward()
        results.append([out.detach().cpu().float(), *(leaf.grad.cpu().float() for leaf in leaves)])
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_causal_with_grouped_heads(for_tpu):
    agree(inputs(4, 2, 150, 150, 64), 1e-4, is_causal=True)
    assert for_tpu == ["forward", "backward"]


def test_lengths_and_widths_that_fill_no_block(for_tpu):
    agree(inputs(1, 1, 140, 300, 80, 40), 1e-4, scale=0.3)
    assert for_tpu == ["forward", "backward"]


def test_mask_of_bool_with_rows_that_see_nothing(for_tpu):
    mask = torch.rand(2, 1, 140, 260) < 0.5
    mask[:, :, 7] = mask[:, :, :64, 128:] = False  # a row, and a block
    agree(inputs(3, 1, 140, 260, 64), 1e-4, attn_mask=mask)


def test_mask_of_floats_and_causal_bfloat16(for_tpu):
    agree(inputs(2, 2, 140, 260, 64), 1e-4, attn_mask=torch.randn(140, 260))
    agree(inputs(2, 1, 130, 130, 128, dtype=torch.bfloat16), 6e-2, is_causal=True)
    assert for_tpu == ["forward", "backward"] * 2


def test_what_it_does_not_serve(for_tpu):
    query, key, value = (t.to("tpu") for t in inputs(2, 2, 140, 140, 64))
    F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    F.scaled_dot_product_attention(query[:, :, :1], key, value)
    F.scaled_dot_product_attention(query, key, value, attn_mask=torch.zeros(2, 2, 140, 140, device="tpu"))
    F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    mask = torch.zeros(140, 140, device="tpu", requires_grad=True)
    F.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
    assert for_tpu == ["forward"] and mask.grad.shape == (140, 140)


def test_virtual_chips_go_on_as_they_did(monkeypatch):
    monkeypatch.setattr(context, "flash_bytes", lambda: 0)
    assert not flash.serves(*(t.numpy() for t in inputs(2, 2, 40, 40, 64)), None, None)


def attention(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def gradients(query, key, value):
    leaves = [t.requires_grad_() for t in (query, key, value)]
    return torch.autograd.grad(attention(*leaves).float().sum(), leaves)


def heads_of(length):
    return [torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta") for heads in (8, 2, 2)]


@on_linux
def test_scores_stay_out_of_memory(monkeypatch):
    ours = aot.compile(attention, heads_of(2048), "v5e-1")
    assert ours.hlo.count('custom_call_target="tpu_custom_call"') == 1
    monkeypatch.setattr(context, "flash_bytes", lambda: float("inf"))
    plain = aot.compile(attention, heads_of(2048), "v5e-1")
    assert "tpu_custom_call" not in plain.hlo
    scores = 4 * 8 * 2048 * 2048
    assert plain.report.hbm_traffic > scores > 8 * ours.report.hbm_traffic
    assert plain.report.temporary_bytes > 8 * ours.report.temporary_bytes


@on_linux
@pytest.mark.parametrize("topology", ["v5e-1", "v6e-1"])
def test_gradients_compile_for_a_chip(topology):
    made = aot.compile(gradients, heads_of(2048), topology)
    assert made.hlo.count('custom_call_target="tpu_custom_call"') == 3
    assert made.report.hbm_traffic < 4 * 8 * 2048 * 2048 and made.report.fits


@on_linux
def test_short_attention_is_left_to_xla():
    assert "tpu_custom_call" not in aot.compile(attention, heads_of(128), "v5e-1").hlo


@on_linux
def test_masks_compile_for_a_chip():
    masked = [torch.empty(2, heads, 2048, 64, dtype=torch.bfloat16, device="meta") for heads in (6, 3, 3)]
    mask = torch.empty(2, 1, 2048, 2048, dtype=torch.bool, device="meta")

    def run(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    made = aot.compile(run, [*masked, mask], "v5e-1")
    assert "tpu_custom_call" in made.hlo and made.report.temporary_bytes < 2**26


@pytest.mark.parametrize("setting, wanted", [("off", math.inf), ("auto", 64 << 20), ("1G", 1 << 30)])
def test_the_setting(monkeypatch, setting, wanted):
    monkeypatch.setenv("TORCH_TPU_FLASH_ATTENTION", setting)
    assert context.flash_bytes.__wrapped__() == wanted
