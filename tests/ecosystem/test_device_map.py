"""Accelerate's and Transformers' device maps see the chip, and nothing lands on the CPU without a word."""

from __future__ import annotations

import warnings

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map, load_checkpoint_and_dispatch
from accelerate.utils import find_executable_batch_size, get_max_memory
from tiny import ids, llama
from transformers import AutoModelForCausalLM

LAYER = 40_000  # bytes, more than one decoder layer has


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokens():
    return llama().generate(ids(1, 6), max_new_tokens=4, do_sample=False)


def load(folder, tmp_path, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, offload_folder=tmp_path, **options)


def test_the_chips_memory_is_seen():
    free = torch.tpu.mem_get_info(0)[0]
    assert 0 < get_max_memory()[0] <= free
    assert get_max_memory({0: "1GB", "cpu": "2GB"}) == {0: 10**9, "cpu": 2 * 10**9}
    assert infer_auto_device_map(llama()) == {"": 0}
    with pytest.raises(ValueError, match="one process drives one chip"):
        get_max_memory({1: "1GB"})


@pytest.mark.parametrize("kind", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_model_that_fits_is_on_the_chip(folder, tmp_path, kind):
    model = load(folder, tmp_path, device_map=kind)
    assert {parameter.device for parameter in model.parameters()} == {torch.device("tpu", 0)}


def test_what_does_not_fit_is_offloaded_and_computed_on_the_chip(folder, tmp_path, tokens):
    model = load(folder, tmp_path, device_map="auto", max_memory={0: 12_288 + LAYER, "cpu": "1GB"})
    assert set(model.hf_device_map.values()) == {0, "cpu"}
    seen = set()
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, args: seen.update(a.device.type for a in args
                                                                     if isinstance(a, torch.Tensor) and a.dim() == 3))
    got = model.generate(ids(1, 6), max_new_tokens=4, do_sample=False)
    assert torch.equal(got.cpu(), tokens) and seen == {"tpu"}


def test_a_chip_too_small_for_any_block_is_said_and_still_used(folder, tmp_path, tokens):
    with pytest.warns(UserWarning, match="all weights are offloaded"):
        model = load(folder, tmp_path, device_map="auto", max_memory={0: 10_000, "cpu": 60_000})
    assert {"cpu", "disk", 0} == set(model.hf_device_map.values())
    assert model(ids(1, 6)).logits.isfinite().all()
    assert torch.equal(model.generate(ids(1, 6), max_new_tokens=4, do_sample=False).cpu(), tokens)


def test_a_model_on_the_cpu_says_why(folder, tmp_path):
    with pytest.warns(UserWarning, match="computed there, since max_memory gives the chip nothing"):
        model = load(folder, tmp_path, device_map="auto", max_memory={"cpu": "1GB"})
    assert model.device.type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(folder, tmp_path, device_map="cpu").device.type == "cpu"  # asked for


def test_accelerates_own_loading_and_offload(folder):
    want = llama()(ids(1, 6)).logits
    model = load_checkpoint_and_dispatch(llama(), folder, device_map="auto")
    torch.testing.assert_close(model(ids(1, 6).to("tpu")).logits.cpu(), want, rtol=1e-4, atol=1e-4)
    model = cpu_offload(llama(), execution_device="tpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    torch.testing.assert_close(model(ids(1, 6)).logits, want, rtol=1e-4, atol=1e-4)


def test_a_batch_too_large_for_the_chip_is_made_smaller():
    tried = []

    @find_executable_batch_size(starting_batch_size=32)
    def run(batch_size):
        tried.append(batch_size)
        if batch_size > 30:
            torch.empty(1 << 50, device="tpu").add_(1)
        return batch_size

    assert run() <= 30 and tried[0] == 32
