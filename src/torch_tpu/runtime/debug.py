"""Whether this process is in debug mode: TORCH_TPU_DEBUG, until `torch.tpu.debug.set_mode` says otherwise."""

from __future__ import annotations

from . import config

_switch = config.Switch(config.DEBUG)

on = _switch.on  # whether operators run synchronously and check the values of their arguments
set = _switch.set  # does not drop the short ways of operators: torch.tpu.debug.set_mode does
