"""What the table lacks: torch's own decomposition, else the CPU; counted, said once, and an error when so wished."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..runtime import config, errors
from ..tensor import buffer
from . import creation
from . import plan as plans
from .kernels import KERNELS

_counts: Counter[str] = Counter()
_mode: str | None = None
_decompositions: dict[Any, Any] | None = None
_inside = threading.local()

# Decompositions of torch that are wrong, or slower than the CPU, for device tensors.
_REFUSED: frozenset[str] = frozenset()


def mode() -> str:
    """"warn", "silent" or "error"."""
    global _mode
    if _mode is None:
        _mode = config.FALLBACK.choice("warn", "silent", "error")
    return _mode


def set_mode(value: str) -> None:
    """Chooses what an operator that only the CPU has does: "warn" (once each), "silent" or "error"."""
    global _mode
    if value not in ("warn", "silent", "error"):
        raise ValueError(f"fallback mode {value!r} is not known; choose warn, silent or error")
    _mode = value


def report() -> dict[str, int]:
    """How often each operator ran on the CPU in this process, most frequent first."""
    return dict(_counts.most_common())


def reset() -> None:
    """Forgets the counts (and warns anew)."""
    _counts.clear()


def decompositions() -> dict[Any, Any]:
    """torch's decompositions, less those that do not serve device tensors."""
    global _decompositions
    if _decompositions is None:
        import torch._decomp
        import torch._refs

        from . import linalg

        _decompositions = {op: fn for op, fn in torch._decomp.decomposition_table.items() if str(op) not in _REFUSED}
        _decompositions.update(linalg.DECOMPOSITIONS)
    return _decompositions


def decomposition(op: Any) -> Any:
    """torch's decomposition of an overload; None when there is none that serves."""
    return decompositions().get(op)


def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an overload that has neither a plan nor a kernel of its own."""
    mutable = plans.mutable_arguments(op)
    if mutable:
        functional = plans.functional_twin(op)
        if functional is not None:
            return _through_functional(op, functional, mutable, args, kwargs)
    found = decomposition(op)
    if found is not None and op not in _active():
        _active().append(op)
        try:
            result = found(*args, **kwargs)
            if result is not NotImplemented:
                return result
        finally:
            _active().pop()
    return on_cpu(op, args, kwargs)


def _active() -> list[Any]:
    if not hasattr(_inside, "ops"):
        _inside.ops = []
    return _inside.ops


def _through_functional(op: Any, functional: Any, mutable: list[str], args: tuple[Any, ...],
                        kwargs: dict[str, Any]) -> Any:
    given = dict(zip([a.name for a in op._schema.arguments], args))
    given.update(kwargs)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in functional._schema.arguments:
        if argument.name in given:
            if argument.kwarg_only or len(positional) < [a.name for a in functional._schema.arguments].index(
                    argument.name):
                named[argument.name] = given[argument.name]
            else:
                positional.append(given[argument.name])
    # Not through the dispatcher: a structured operator's functional form would only call its out= form again.
    kernel = KERNELS.get(str(functional))
    result = kernel(*positional, **named) if kernel is not None else run(functional, tuple(positional), named)
    results = list(result) if isinstance(result, tuple) else [result]
    if len(functional._schema.returns) == 1:
        results = [result]
    fresh = len(results) - len(mutable)
    for name, value in zip(mutable, results[fresh:]):
        targets = given[name] if isinstance(given[name], list | tuple) else [given[name]]
        values = value if isinstance(value, list | tuple) else [value]
        is_out = any(a.is_out for a in op._schema.arguments)
        for target, new in zip(targets, values):
            if target is None:
                continue
            if is_out:
                if not torch.can_cast(new.dtype, target.dtype):
                    raise RuntimeError(f"result type {new.dtype} can't be cast to the desired output type "
                                       f"{target.dtype}")
                if target.shape != new.shape:
                    creation.resize_output_(target, new.shape, target.device)
            target.copy_(new)
    values = []
    position = 0
    aliases = {tuple(sorted(a.alias_info.before_set)): a.name for a in op._schema.arguments
               if a.alias_info is not None and a.alias_info.is_write}
    for returned in op._schema.returns:
        if returned.alias_info is not None and returned.alias_info.is_write:
            values.append(given[aliases[tuple(sorted(returned.alias_info.before_set))]])
        else:
            values.append(results[position])
            position += 1
    return values[0] if len(values) == 1 else (None if not values else tuple(values))


def on_cpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies the tensors to the CPU, runs the operator there, copies results back and writes what it mutated."""
    name = str(op)
    if mode() == "error":
        raise errors.UnsupportedOperatorError(
            f"{name} has no lowering for tpu and TORCH_TPU_FALLBACK=error forbids running it on the CPU. Unset the "
            "variable to allow the (slow) fallback, or rewrite the code with another operator.")
    _counts[name] += 1
    if config.logs("fallback"):
        print(f"torch_tpu: {name} runs on the CPU (call {_counts[name]})", file=sys.stderr)
    if _counts[name] == 1 and mode() == "warn":
        warnings.warn(
            f"{name} has no lowering for tpu and runs on the CPU, with a copy there and back at every call "
            "(torch.tpu.fallback_report() counts them; TORCH_TPU_FALLBACK=error makes it an error).",
            RuntimeWarning, stacklevel=2)
    moved: dict[int, torch.Tensor] = {}

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and buffer.of(value) is not None:
            if id(value) not in moved:
                moved[id(value)] = value.cpu()
            return moved[id(value)]
        if isinstance(value, torch.device) and value.type == "tpu":
            return torch.device("cpu")
        return value

    def back(value: Any) -> Any:
        return value.to("tpu") if isinstance(value, torch.Tensor) else value

    cpu_args, cpu_kwargs = pytree.tree_map(to_cpu, (args, kwargs))
    result = op(*cpu_args, **cpu_kwargs)
    originals = {id(moved[id(leaf)]): leaf for leaf in pytree.tree_leaves((args, kwargs))
                 if isinstance(leaf, torch.Tensor) and id(leaf) in moved}
    given = dict(zip([a.name for a in op._schema.arguments], args))
    given.update(kwargs)
    for name_ in plans.mutable_arguments(op):
        for leaf in pytree.tree_leaves(given.get(name_)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in moved:
                if leaf.shape != moved[id(leaf)].shape:
                    leaf.resize_(moved[id(leaf)].shape)
                leaf.copy_(moved[id(leaf)])

    def home(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in originals:
            return originals[id(value)]
        return back(value)

    return pytree.tree_map(home, result)
