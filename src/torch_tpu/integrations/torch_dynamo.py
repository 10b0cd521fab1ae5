"""Dynamo (torch 2.13) must not trace the device's own code: between the parts of a broken graph it would otherwise
compile the Python kernels that run there."""

from __future__ import annotations

from types import ModuleType

from . import on_import

OWN = ("compile", "eager", "integrations", "lowering", "runtime", "tensor")


def _skip_our_own(trace_rules: ModuleType) -> None:
    for package in OWN:
        trace_rules.add(f"torch_tpu.{package}")


def install() -> None:
    on_import.after("torch._dynamo.trace_rules", _skip_our_own)
