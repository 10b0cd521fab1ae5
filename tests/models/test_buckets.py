"""`generate` with a static cache compiles for few lengths, and gives the tokens of the CPU for every length."""

import copy
import random

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from torch_tpu.integrations.transformers_generate import bucket, cache_length
from torch_tpu.runtime import executable

SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=97, max_position_embeddings=640)


def models():
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SMALL)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=640)),
        "mistral with a window": MistralForCausalLM(MistralConfig(**SMALL, sliding_window=24)),
    }


def prompt(length, batch=1):
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, 97, (batch, length), generator=generator)


def generate(model, ids, new=5, **kwargs):
    mask = kwargs.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new,
                          min_new_tokens=new, pad_token_id=0, do_sample=False, **kwargs).cpu()


def compare(host, chip, lengths):
    """Tokens against the CPU's; returns how many graphs were compiled."""
    before = len(executable.STATISTICS.graphs)
    for length in lengths:
        ids = prompt(length)
        assert torch.equal(generate(chip, ids, cache_implementation="static"), generate(host, ids)), length
    return len(executable.STATISTICS.graphs) - before


@pytest.mark.parametrize("name", list(models()))
def test_tokens_are_those_of_the_cpu(name):
    host = models()[name].eval()
    chip = copy.deepcopy(host).to("tpu")
    graphs = compare(host, chip, (5, 17, 40, 9, 33))
    assert graphs == 4 if "window" not in name else True  # three buckets and the decode step


def test_many_lengths_few_programs():
    host = models()["llama"].eval()
    chip = copy.deepcopy(host).to("tpu")
    lengths = random.Random(0).sample(range(5, 500), 64)
    assert compare(host, chip, lengths) <= 9
    small = executable.STATISTICS.compiled + executable.STATISTICS.loaded
    assert compare(host, chip, (6, 100, 450)) == 0
    assert executable.STATISTICS.compiled + executable.STATISTICS.loaded == small


def test_batches_padded_on_the_left():
    host = models()["llama"].eval()
    chip = copy.deepcopy(host).to("tpu")
    ids, mask = prompt(21, 3), torch.ones(3, 21, dtype=torch.int64)
    mask[1, :8] = mask[2, :20] = 0
    got = generate(chip, ids, attention_mask=mask, cache_implementation="static")
    assert torch.equal(got, generate(host, ids, attention_mask=mask))


def test_sampling_and_beams_and_logits():
    host = models()["llama"].eval()
    chip = copy.deepcopy(host).to("tpu")
    ids = prompt(13)
    beams = dict(num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(chip.generate(ids.to("tpu"), cache_implementation="static", **beams).cpu(),
                       host.generate(ids, **beams))
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
                   output_logits=True)
    here, there = chip.generate(ids.to("tpu"), cache_implementation="static", **options), host.generate(ids, **options)
    assert len(here.logits) == len(there.logits) == 4
    for a, b in zip(here.logits, there.logits):
        assert a.shape == b.shape == (1, 97)
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    sampled = chip.generate(ids.to("tpu"), cache_implementation="static", do_sample=True, max_new_tokens=4,
                            pad_token_id=0)
    assert sampled.shape == (1, 17)


def test_a_cache_that_is_used_again():
    from transformers import StaticCache

    from torch_tpu.integrations.transformers_forward import cache_name

    host = models()["llama"].eval()
    chip = copy.deepcopy(host).to("tpu")
    ids = prompt(12)
    cache = StaticCache(config=chip.config, max_cache_len=64)
    first = generate(chip, ids, **{cache_name(): cache})
    assert torch.equal(first, generate(host, ids))
    longer = torch.cat([first, prompt(7)], dim=1)
    assert torch.equal(generate(chip, longer, **{cache_name(): cache}), generate(host, longer))
    cache.reset()
    assert torch.equal(generate(chip, ids, **{cache_name(): cache}), first)


def test_off(monkeypatch):
    monkeypatch.setenv("TORCH_TPU_BUCKETS", "off")
    host = models()["llama"].eval()
    chip = copy.deepcopy(host).to("tpu")
    assert torch.equal(generate(chip, prompt(5), cache_implementation="static"), generate(host, prompt(5)))
    assert "_tpu_prefill" not in chip.__dict__


def test_sizes():
    assert [bucket(n) for n in (1, 16, 17, 500, 512, 513, 1025)] == [16, 16, 32, 512, 512, 1024, 1536]
    assert [cache_length(n, 1) for n in (5, 1000, 1024, 1025)] == [1024, 1024, 1024, 1536]
    assert [cache_length(n, 32) for n in (5, 129, 600)] == [128, 256, 1024]
