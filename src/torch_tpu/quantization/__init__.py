"""Weights of eight and four bits: `torch_tpu.quantize(model, "int8")`."""

from .layers import Int4Linear, Int8DynamicLinear, Int8Embedding, Int8Linear
from .model import MODES, check, dequantize, finish, is_quantized, plan, quantize

__all__ = ["MODES", "Int4Linear", "Int8DynamicLinear", "Int8Embedding", "Int8Linear", "check", "dequantize", "finish",
           "is_quantized", "plan", "quantize"]
