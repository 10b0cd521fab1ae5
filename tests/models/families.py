"""Tiny random models of ten Transformers families, with inputs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB = 96
_TEXT: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, head_dim=8,
                             bos_token_id=1, eos_token_id=None, pad_token_id=0)

DECODERS = ("qwen3", "llama", "glm4", "gemma3", "mixtral", "qwen3_moe")
GENERATORS = (*DECODERS, "whisper", "t5")
FAMILIES = (*DECODERS, "bert", "vit", "whisper", "t5")


def make(family: str) -> PreTrainedModel:
    """A model with seeded random weights, in float32, in eval mode, scaled so that greedy choices are no ties."""
    torch.manual_seed(0)
    model: PreTrainedModel = _make(family).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0 if family in DECODERS else 2.0)
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


def _make(family: str) -> PreTrainedModel:
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_TEXT))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**_TEXT))
    if family == "glm4":
        return Glm4ForCausalLM(Glm4Config(**_TEXT))
    if family == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**_TEXT, sliding_window=8, layer_types=["sliding_attention",
                                                                                          "full_attention"]))
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2))
    if family == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_TEXT, num_experts=4, num_experts_per_tok=2,
                                                  moe_intermediate_size=24, decoder_sparse_step=1))
    if family == "bert":
        return BertForMaskedLM(BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                          intermediate_size=48, max_position_embeddings=64))
    if family == "vit":
        return ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                                   intermediate_size=48, image_size=16, patch_size=4, num_labels=5))
    if family == "whisper":
        return WhisperForConditionalGeneration(WhisperConfig(
            vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
            max_source_positions=16, max_target_positions=64, decoder_start_token_id=1, bos_token_id=1,
            eos_token_id=2, pad_token_id=0, suppress_tokens=None, begin_suppress_tokens=None))
    if family == "t5":
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2,
                                                   num_heads=4, decoder_start_token_id=0, eos_token_id=1,
                                                   pad_token_id=0))
    raise ValueError(family)


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Inputs of a forward pass with labels, on the CPU."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, 7), generator=g)
    if family in DECODERS:
        return {"input_ids": ids, "labels": ids}
    if family == "bert":
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g), "labels": torch.tensor([1, 3])}
    if family == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=g), "labels": ids}
    return {"input_ids": ids, "labels": ids[:, :5].contiguous()}


def prompt(family: str) -> dict[str, torch.Tensor]:
    """Inputs of generate, on the CPU."""
    given = inputs(family)
    given.pop("labels")
    return given
