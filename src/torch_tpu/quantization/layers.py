"""Linear layers and embeddings over small integers. Each is its floating-point layer with another class and other
parameters, so hooks on it and references to it stay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import numbers


def _parameter(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


class _Linear(nn.Linear):
    """What the linear layers share: autocast, leading dimensions, bias, and gradients of the input."""

    weight_scale: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        if (torch.is_grad_enabled() and x.requires_grad) or not self.takes(x):
            return F.linear(x, self.floats().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        product = self.product(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    def takes(self, x: Tensor) -> bool:
        """Whether the product over integers exists for such an input; otherwise the weight becomes floats first."""
        return x.dtype in (torch.float32, torch.bfloat16, torch.float16)

    def product(self, x: Tensor) -> Tensor:
        """(M, in_features) to (M, out_features), of the input's dtype."""
        raise NotImplementedError

    def floats(self) -> Tensor:
        """The weight (out_features, in_features) that the integers stand for."""
        raise NotImplementedError


class Int8Linear(_Linear):
    """weight: int8 (out_features, in_features); weight_scale: (out_features,)."""

    def quantize_(self, group_size: int = 0) -> None:
        weight, scale = numbers.to_int8(self.weight.detach())
        self.weight, self.weight_scale = _parameter(weight), _parameter(scale)

    def floats(self) -> Tensor:
        return numbers.from_int8(self.weight, self.weight_scale)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self.weight, self.weight_scale.to(x.dtype))

    def extra_repr(self) -> str:
        return super().extra_repr() + ", weight=int8"


class Int8DynamicLinear(Int8Linear):
    """As Int8Linear, and the input becomes int8 too, with a scale for each row of it: a product of integers."""

    def product(self, x: Tensor) -> Tensor:
        q, scale = numbers.rows_to_int8(x)
        return (torch._int_mm(q, self.weight.t()).float() * scale * self.weight_scale.float()).to(x.dtype)

    def extra_repr(self) -> str:
        return super().extra_repr() + ", activations=int8"


class Int4Linear(_Linear):
    """weight: int8 (in_features / 2, out_features), two numbers a byte; weight_scale: (groups, out_features)."""

    inputs_first = True  # unlike nn.Linear's weight: torch_tpu.mesh reads it

    def quantize_(self, group_size: int) -> None:
        weight, scale = numbers.to_int4(self.weight.detach(), group_size)
        self.weight, self.weight_scale = _parameter(weight), _parameter(scale)

    def floats(self) -> Tensor:
        return numbers.from_int4(self.weight, self.weight_scale)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.tpu.int4_mm(x, self.weight, self.weight_scale)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", weight=int4, group_size={self.in_features // self.weight_scale.shape[0]}"


class Int8Embedding(nn.Embedding):
    """weight: int8 (num_embeddings, embedding_dim); weight_scale: (num_embeddings,)."""

    weight_scale: nn.Parameter

    def quantize_(self, group_size: int = 0) -> None:
        weight, scale = numbers.to_int8(self.weight.detach())
        self.weight, self.weight_scale = _parameter(weight), _parameter(scale)

    def floats(self) -> Tensor:
        return numbers.from_int8(self.weight, self.weight_scale)

    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight_scale[input]
        return self.weight[input].to(scale.dtype) * scale[..., None]

    def extra_repr(self) -> str:
        return super().extra_repr() + ", weight=int8"


QUANTIZED = (Int8Linear, Int4Linear, Int8Embedding)
