import torch

from .. import rms_norm


class RMSNorm(torch.nn.Module):
    """As LlamaRMSNorm and its like in Transformers have them."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)
