"""Entry point `torch.backends`: makes the `tpu` device appear when torch is imported. No JAX, no output, no thread."""

from __future__ import annotations

import sys

SUPPORTED = "2.13 to 2.14"

state = "not loaded"  # for `torch-tpu doctor`: "loaded", or why not


def load() -> None:
    """Registers the device, once. Never raises: where torch or JAX is missing or unfit, `import torch` goes on without
    the device and one line on stderr says why. A wrong TORCH_TPU_* variable is reported by the first use instead."""
    global state
    if state != "not loaded":
        return
    state = "loaded"
    try:
        _register()
    except Exception as error:
        state = f"{type(error).__name__}: {error}"
        print(f"torch_tpu: the tpu device is not available: {error} (`python -m torch_tpu doctor` says more)",
              file=sys.stderr)


def _register() -> None:
    import importlib.util

    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if not (2, 13) <= version < (2, 15):
        raise ImportError(f"torch {torch.__version__} is not supported; torch_tpu works with torch {SUPPORTED}")
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("jaxlib") is None:
        raise ImportError("JAX is not installed: pip install 'jax>=0.10,<0.12'")
    from . import device
    from .integrations import all as integrations

    device.register()
    integrations.install()
