"""Pallas kernels in our programs: interpreted on CPUs (virtual chips), compiled by Mosaic for TPUs.

`pallas_call` asks for interpret=True on a CPU and raises without it. The rules here stand before JAX's own and do that
where a program of ours is lowered; a user's own JAX code meets JAX's behaviour. They also lower kernels without 64-bit
types, with which ours are traced and which Mosaic does not take. Private API of JAX, tried on jax 0.10.2;
tests/test_doors.py opens it.
"""

from __future__ import annotations

import sys
from typing import Any

from . import jax_door

_MODULE = "jax._src.pallas.pallas_call"
_installed = False


def install_if_used() -> None:
    """Puts the rules in place once Pallas is imported, which takes half a second and is left to those who use it."""
    if not _installed and _MODULE in sys.modules:
        install()


def install() -> None:
    """Puts the rules in place, once."""
    global _installed
    if _installed:
        return
    from jax._src.interpreters import mlir
    from jax._src.pallas import pallas_call as theirs

    def interpreted(context: Any, *nodes: Any, interpret: Any, **parameters: Any) -> Any:
        interpret = interpret or jax_door.lowering.active
        return _narrow(theirs._pallas_call_lowering, context, *nodes, interpret=interpret, **parameters)

    def compiled(context: Any, *nodes: Any, **parameters: Any) -> Any:
        return _narrow(theirs._pallas_call_lowering, context, *nodes, **parameters)

    mlir.register_lowering(theirs.pallas_call_p, interpreted, platform="cpu")
    mlir.register_lowering(theirs.pallas_call_p, compiled, platform="tpu")
    _installed = True


def _narrow(rule: Any, *nodes: Any, **parameters: Any) -> Any:
    if not jax_door.lowering.active:
        return rule(*nodes, **parameters)
    with jax_door.width(False):
        return rule(*nodes, **parameters)
