"""Whether a transform of torch.func or forward-mode differentiation looks at an operator. Operators that we take whole
have a backward only; under a transform they must be PyTorch's own smaller ones.

Uses torch._C._functorch (private; tried on torch 2.13.0).
"""

from __future__ import annotations

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad


def active(*tensors: torch.Tensor | None) -> bool:
    """Whether vmap, grad, jvp or the like is at work, or one of the tensors carries a tangent."""
    if peek_interpreter_stack() is not None:
        return True
    if forward_ad._current_level < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
