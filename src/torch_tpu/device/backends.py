"""torch.backends.tpu. Its presence is also how the `kernels` package recognises the backend."""

from __future__ import annotations

import importlib.metadata


def is_built() -> bool:
    """True: there is nothing to build."""
    return True


def is_available() -> bool:
    """Whether this process can use the device."""
    from . import module

    return module.is_available()


def version() -> dict[str, str | None]:
    """Versions of what runs the device: torch_tpu, jax, jaxlib, libtpu (None where it is not installed)."""
    found: dict[str, str | None] = {}
    for name in ("torch_tpu", "jax", "jaxlib", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
