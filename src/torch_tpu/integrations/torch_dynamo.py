"""Dynamo (torch 2.13) must not trace the device's own code, nor JAX's: between the parts of a broken graph it would
otherwise compile the Python kernels that run there. Skipping a frame does not skip those it calls, hence JAX too."""

from __future__ import annotations

from types import ModuleType

from . import on_import

OWN = ("compile", "device", "eager", "integrations", "lowering", "runtime", "tensor")
JAX = ("jax", "jaxlib")


def _skip(trace_rules: ModuleType) -> None:
    for package in (*(f"torch_tpu.{name}" for name in OWN), *JAX):
        trace_rules.add(package)


def install() -> None:
    on_import.after("torch._dynamo.trace_rules", _skip)
