"""Operators that write their arguments, and operators that take over an argument's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from ..eager import dispatcher
from ..lowering import strided
from ..runtime import dtypes, executable
from ..tensor import buffer
from . import signature
from .operator import Operator, avals_of

Tensor = torch.Tensor


def in_place(functional: Operator, short: str, library: torch.library.Library) -> Any:
    """The operator that writes its arguments, over the functional one whose last results are their new values. On the
    device it is a plan over that one's lowering, as PyTorch's own in-place operators are."""
    library.define(short + signature.schema(functional.signature, tuple(functional.mutated)),
                   tags=(torch.Tag.pt2_compliant_tag,))
    name = functional.name.removesuffix("_functional")
    overload = getattr(getattr(torch.ops, name.split("::")[0]), short).default
    count = len(functional.mutated)
    held: list[Any] = []

    def kept(results: Any) -> Any:
        """What is returned, without the new values."""
        results = results if isinstance(results, tuple) else (results,)
        rest = results[:len(results) - count]
        return None if not rest else rest[0] if len(rest) == 1 else rest

    def targets(args: Any, kwargs: dict[str, Any]) -> list[Any]:
        given = functional.signature.arguments(args, kwargs)
        return [v for p, v in zip(functional.signature.parameters, given) if p.name in functional.mutated]

    def news(results: Any) -> Any:
        return (results if isinstance(results, tuple) else (results,))[-count:]

    def check(new: Any, target: Tensor) -> None:
        if new.shape != target.shape:
            raise ValueError(f"{name}: the new value of an argument has shape {tuple(new.shape)}, the argument "
                             f"{tuple(target.shape)}")

    def meta(*args: Any, **kwargs: Any) -> Any:
        results = functional.meta(*args, **kwargs)
        for new, target in zip(news(results), targets(args, kwargs), strict=True):
            check(new, target)
        return kept(results)

    def on_host(*args: Any, **kwargs: Any) -> Any:
        results = functional.on_host(*args, **kwargs)
        for new, target in zip(news(results), targets(args, kwargs), strict=True):
            check(new, target)
            target.copy_(new)
        return kept(results)

    def on_device(*args: Any, **kwargs: Any) -> Any:
        if not held:
            held.append(dispatcher.kernel(overload))
        return held[0](*args, **kwargs)

    def autograd(*args: Any, **kwargs: Any) -> Any:
        given = functional.signature.arguments(args, kwargs)
        tensors, _ = functional.signature.split(given)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(f"{name} writes its arguments and has no gradient, and an argument requires one; call "
                               "it under torch.no_grad(), or with detached tensors")
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    library.impl(short, meta, "Meta")
    library.impl(short, on_host, "CPU")
    library.impl(short, on_device, "PrivateUse1")
    library.impl(short, autograd, "Autograd")

    @overload.py_functionalize_impl
    def functionalize(api: Any, *args: Any, **kwargs: Any) -> Any:
        """In a compiled graph: the functional operator, whose results replace the arguments."""
        plain = api.unwrap_tensors(args)
        named = api.unwrap_tensors(kwargs)
        with api.redispatch_to_next():
            results = functional.overload(*plain, **named)
        for new, target in zip(news(results), targets(args, kwargs), strict=True):
            api.replace(target, new)
            api.mark_mutation_hidden_from_autograd(target)
            api.commit_update(target)
            api.sync(target)
        return api.wrap_tensors(kept(results))

    return overload


def consuming(op: Operator, names: tuple[str, ...]) -> Callable[..., Any]:
    """The eager kernel of an operator that takes over arguments' memory. A tensor that is a part of its memory, or
    whose memory others hold too, keeps it."""
    programs: dict[Any, executable.Executable] = {}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dispatcher.load()
        arguments = op.signature.arguments(args, kwargs)
        tensors, layout = op.signature.split(arguments)
        chosen = [v for p, v in zip(op.signature.parameters, arguments) if p.name in names and v is not None]
        held = [buffer.of(tensor) for tensor in tensors]
        if any(each is None for each in held):
            return dispatcher.kernel(op.overload)(*args, **kwargs)  # says what is wrong
        donate = tuple(at for at, (tensor, memory) in enumerate(zip(tensors, held))
                       if any(tensor is each for each in chosen) and _whole(tensor, memory)
                       and sum(memory is other for other in held) == 1)
        windows = [(strided.of(tensor), dtypes.to_numpy(tensor.dtype)) for tensor in tensors]
        key = (layout, donate, *((each.shape, each.dtype, *window)  # type: ignore[union-attr]
                                 for each, window in zip(held, windows)))
        program = programs.get(key)
        if program is None:
            traced = op.program(layout, avals_of(tensors))

            def flat(*arrays: Any) -> list[Any]:
                return traced([strided.read(a, view, kind) for a, (view, kind) in zip(arrays, windows)])

            avals = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in held]  # type: ignore[union-attr]
            program = programs[key] = executable.build(flat, avals, op.name, donate)
        results = program([each.array() for each in held])  # type: ignore[union-attr]
        for at in donate:
            tensors[at].untyped_storage().resize_(0)
        return op.structure([buffer.wrap(array) for array in results])

    return kernel


def _whole(tensor: Tensor, held: Any) -> bool:
    return not held.shared and tensor.is_contiguous() and tensor.numel() * tensor.element_size() == held.nbytes()
