"""The exceptions torch_tpu raises, and the translation of XLA's errors into PyTorch's."""

from __future__ import annotations

import torch


class UnsupportedOperatorError(NotImplementedError):
    """No lowering, no decomposition, and the CPU fallback is switched off."""


class CompileOptionError(ValueError):
    """An option given to torch.compile(backend="tpu") that does not exist."""


class CaptureError(RuntimeError):
    """A training step given to torch.tpu.compile_step does something that cannot become part of one program."""


def from_xla(error: Exception, doing: str) -> Exception:
    """The exception PyTorch users expect for an error of XLA's runtime or compiler."""
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or "out of memory" in text:
        return torch.OutOfMemoryError(
            f"tpu: out of memory while {doing}: {first}. Free tensors you no longer need, use a smaller batch or a "
            "shorter sequence, a narrower dtype (bfloat16), or several chips.")
    return RuntimeError(f"tpu: XLA failed while {doing}: {first}")
