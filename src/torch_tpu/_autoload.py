"""Entry point `torch.backends`: makes the `tpu` device appear when torch is imported. No JAX, no output, no thread."""

from __future__ import annotations

import warnings

_loaded = False

SUPPORTED = "torch >=2.13,<2.15"


def load() -> None:
    """Registers the device. Never raises: `import torch` goes on without the device, and one warning says why."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    try:
        _register()
    except Exception as error:
        warnings.warn(f"torch_tpu: the tpu device is not available: {error} (supported: {SUPPORTED}; see "
                      "`python -m torch_tpu doctor`)", RuntimeWarning, stacklevel=2)


def _register() -> None:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if not (2, 13) <= version < (2, 15):
        raise ImportError(f"torch {torch.__version__} is outside the supported range")
    from . import device
    from .integrations import all as integrations

    device.register()
    integrations.install()
