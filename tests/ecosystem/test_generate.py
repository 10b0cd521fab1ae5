"""`generate` with every cache and way of decoding that works offline: the tokens of CPU PyTorch."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import ids, llama

GREEDY = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)


@pytest.fixture(scope="module")
def models():
    return llama(), llama().to("tpu")


def padded():
    x, mask = ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    return x.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding_window", "hybrid", "offloaded", "offloaded_static"])
def test_caches(models, cache):
    x, mask = padded()
    want = models[0].generate(x, attention_mask=mask, **GREEDY)  # theirs offload to CUDA only
    got = models[1].generate(x.to("tpu"), attention_mask=mask.to("tpu"), cache_implementation=cache, **GREEDY)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"guidance_scale": 1.5}],
                         ids=lambda s: next(iter(s)))
def test_ways_of_decoding(models, settings):
    x = ids(1, 9)
    assert torch.equal(models[1].generate(x.to("tpu"), **GREEDY, **settings).cpu(),
                       models[0].generate(x, **GREEDY, **settings))


def test_assisted(models):
    x = ids(1, 9)
    got = models[1].generate(x.to("tpu"), assistant_model=llama(num_hidden_layers=1).to("tpu"), **GREEDY)
    assert torch.equal(got.cpu(), models[0].generate(x, **GREEDY))


def test_continuous_batching(models):
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this Transformers has no ContinuousBatchingConfig")
    prompts = [ids(1, 9)[0].tolist(), ids(1, 4)[0].tolist()]
    settings = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = transformers.ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=32)
    got = models[1].generate_batch(prompts, generation_config=settings, continuous_batching_config=small)
    want = [models[0].generate(torch.tensor([p]), max_new_tokens=4, do_sample=False)[0, len(p):].tolist()
            for p in prompts]
    assert sorted(request.generated_tokens for request in got.values()) == sorted(want)


def test_the_paged_cache_is_sized_by_the_chips_memory():
    from transformers.generation.continuous_batching import cache

    device, total, reserved, allocated = cache.get_device_and_memory_breakdown()
    assert device.type == "tpu" and allocated == reserved <= total <= torch.tpu.mem_get_info(0)[1]
