"""torch.tpu.distributed: one process a chip, launched by torchrun; process groups for backends `tpu_dist` and `tpu`."""

from __future__ import annotations

from .environment import set_tpu_launch_env

__all__ = ["set_tpu_launch_env"]
