"""The `torch.tpu` namespace and its registration with PyTorch. Start with module.py."""

from __future__ import annotations


def register() -> None:
    """Registers the device, its module and its dispatcher hooks with PyTorch (once, without JAX)."""
    import sys

    import torch
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from ..eager import dispatcher
    from ..tensor import generator, storage
    from . import accelerator, amp, backends, backward_errors, module, namespace, streams

    _setup_privateuseone_for_python_backend("tpu", module, device_guard=backward_errors.Guard())
    dispatcher.install()
    for part in (amp, backward_errors, generator, streams, storage, accelerator, namespace):
        part.install()
    torch.backends.tpu = backends  # type: ignore[attr-defined]
    sys.modules["torch.backends.tpu"] = backends
