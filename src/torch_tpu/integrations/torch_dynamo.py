"""Dynamo (torch 2.13) must not trace the device's own code, nor JAX's: between the parts of a broken graph it would
otherwise compile the Python kernels that run there. Skipping a frame does not skip those it calls, hence JAX too.

What becomes part of a user's model is traced as the rest of the model is.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from types import ModuleType

from . import on_import

OWN = ("compile", "device", "distributed", "eager", "lowering", "runtime", "tensor")
JAX = ("jax", "jaxlib")
TRACED = ("torch_collectives", "transformers_mesh", "transformers_tp")
CUSTOM = ("autograd", "donation", "host", "operator", "program", "signature")  # what calls an operator is traced


def _skip(trace_rules: ModuleType) -> None:
    here = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]) if found.name not in TRACED]
    for name in (*(f"torch_tpu.{name}" for name in OWN), *(f"{__package__}.{name}" for name in here),
                 *(f"torch_tpu.custom.{name}" for name in CUSTOM), *JAX):
        trace_rules.add(name)


def install() -> None:
    on_import.after("torch._dynamo.trace_rules", _skip)
