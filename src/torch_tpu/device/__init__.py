"""The `torch.tpu` namespace and its registration with PyTorch."""

from __future__ import annotations


def register() -> None:
    """Registers the device, its module and its dispatcher hooks with PyTorch (once, without JAX)."""
    import torch
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from ..eager import dispatcher
    from . import module

    _setup_privateuseone_for_python_backend("tpu", module)
    dispatcher.install()
    torch.backends.tpu = module  # type: ignore[attr-defined]
