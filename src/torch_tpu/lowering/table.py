"""THE table: ATen operator -> JAX function, and how such a function is called.

A lowering takes the operator's arguments in schema order, with tensors as JAX values, dtypes as NumPy dtypes, and
without the arguments that only say where a result lives (device, layout, pin_memory, memory_format, generator). A
`Scalar` argument is a Python number, or a weakly typed 0-d JAX value when the program is to serve every number; use
`promotion` to mix it with tensors. It returns a JAX value, or a tuple or list of them (None for an undefined tensor).
It never sees a torch tensor. The caller casts results to the dtype PyTorch's own rules demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# Arguments that say where a result lives, not what it is.
PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "generator", "non_blocking"})


@dataclass(frozen=True)
class Lowering:
    """How one operator becomes JAX.

    Attributes:
        fn: the JAX function.
        random: it takes a keyword `key`, a uint32[2] key for JAX's counter-based generator.
        static: `Scalar` arguments whose number is part of the program (a shape, a branch).
        traced: `float` or `int` arguments that change often and must not be part of the program (a learning rate).
        users: an operator from a user's JAX function, which registers its kernels itself (custom/); CPU PyTorch does
            not stand in for it.
    """

    name: str
    fn: Callable[..., Any]
    random: bool = False
    static: frozenset[str] = frozenset()
    traced: frozenset[str] = frozenset()
    users: bool = False


TABLE: dict[str, Lowering] = {}


def lowering(*names: str, random: bool = False, static: Iterable[str] = (),
             traced: Iterable[str] = (), users: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a function into the table under one or more overloads ("aten.add.Tensor")."""

    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in TABLE:
                raise ValueError(f"{name} has two lowerings: {TABLE[name].fn.__module__} and {fn.__module__}")
            TABLE[name] = Lowering(name, fn, random, frozenset(static), frozenset(traced), users)
        return fn

    return enter


def find(name: str) -> Lowering | None:
    """The lowering of an overload, by its full name."""
    return TABLE.get(name)
