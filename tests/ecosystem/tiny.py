"""Tiny models and data of the tests in this folder."""

from __future__ import annotations

import torch
import torchvision_import  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=None, pad_token_id=0)


def llama(**changed) -> LlamaForCausalLM:
    """The same weights at every call."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changed})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # so that the tokens do not all come out the same
    return model


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(seed))
