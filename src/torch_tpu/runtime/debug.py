"""Whether this process is in debug mode: TORCH_TPU_DEBUG, until `torch.tpu.debug.set_mode` says otherwise."""

from __future__ import annotations

from . import config

_on: bool | None = None


def on() -> bool:
    """Whether operators run synchronously and check the values of their arguments."""
    global _on
    if _on is None:
        _on = config.DEBUG.flag()
    return _on


def set(flag: bool) -> bool:
    """Switches; returns what was. Does not drop the short ways of operators: `torch.tpu.debug.set_mode` does."""
    global _on
    before = on()
    _on = flag
    return before
