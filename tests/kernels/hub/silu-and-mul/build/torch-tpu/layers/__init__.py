import torch

from .. import silu_and_mul


class SiluAndMul(torch.nn.Module):
    """silu of the first half of the last dimension, times the second half."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return silu_and_mul(x[..., :half], x[..., half:])
