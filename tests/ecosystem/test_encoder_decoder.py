"""`generate` of encoder-decoders, in every way of decoding and with every cache: the CPU's tokens."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torchvision_import  # noqa: F401
import transformers

SIZE, STEPS = 96, 5
SHAPE = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             decoder_start_token_id=1, tie_word_embeddings=False)
WAYS = {"greedy": {}, "beams": {"num_beams": 3, "num_return_sequences": 2},
        "static": {"cache_implementation": "static"}}


@functools.cache
def models(family: str):
    torch.manual_seed(0)
    if family == "t5":
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=SIZE, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
            feed_forward_proj="gated-gelu"))
    elif family == "bart":
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(
            **SHAPE, max_position_embeddings=64, forced_eos_token_id=None))
    else:
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
            **SHAPE, num_mel_bins=8, max_source_positions=20, max_target_positions=40, suppress_tokens=None,
            begin_suppress_tokens=None))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # so that the best tokens are no ties
    model.generation_config.update(eos_token_id=None, max_length=None, pad_token_id=0)
    return model.eval(), copy.deepcopy(model).to("tpu").eval()


def inputs(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=generator)}
    ids, mask = torch.randint(3, SIZE, (2, 9), generator=generator), torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_the_tokens_are_the_cpus(family, way, no_fallback):
    settings, given = WAYS[way], inputs(family)
    on_the_cpu, on_the_chip = models(family)
    cpu = {name: value for name, value in settings.items() if name != "cache_implementation"}
    want = on_the_cpu.generate(**given, max_new_tokens=STEPS, do_sample=False, **cpu)
    got = on_the_chip.generate(**{name: value.to("tpu") for name, value in given.items()}, max_new_tokens=STEPS,
                               do_sample=False, **settings)
    assert got.device.type == "tpu" and torch.equal(got.cpu(), want)
    assert len(want.unique()) > 1


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_training_with_labels(family, no_fallback):
    losses = []
    for device in ("cpu", "tpu"):
        model = copy.deepcopy(models(family)[0]).to(device).train()
        model.config.dropout = 0
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for name in ("dropout", "activation_dropout", "attention_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        given = {name: value.to(device) for name, value in inputs(family).items()}
        labels = torch.randint(3, SIZE, (2, 6), generator=torch.Generator().manual_seed(2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            loss = model(**given, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-3) and losses[5] < losses[3]
