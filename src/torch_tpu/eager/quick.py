"""The short way of operators of one or two tensors that cover their whole memory: the executable is found by the kinds
of the arrays, without building a key. The first call, and every other, goes through `execute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime import transfer
from ..tensor import buffer, torch_door
from . import batch
from .plan import Plan

Tensor = torch.Tensor
Table = dict[Any, "Entry"]


class Entry:
    """An executable with one result: a new tensor of this kind and layout, or (None) the first argument's new data.
    `precision` is the float32 matmul precision it was made for, where that matters."""

    __slots__ = ("kind", "node", "precision", "program", "template")

    def __init__(self, node: batch.Node, kind: buffer.Kind | None, template: torch_door.Template | None,
                 precision: str | None) -> None:
        self.node = node
        self.program: Any = None
        self.kind, self.template, self.precision = kind, template, precision


_tables: list[Table] = []
_NUMBERS = (int, float, complex)
_NUMBER_DTYPES = (torch.float64, torch.int64)


def clear() -> None:
    """Forgets all short ways; for settings that change what a call must do."""
    for table in _tables:
        table.clear()


def kernel(plan: Plan, run: Callable[..., Any]) -> Callable[..., Any] | None:
    """A kernel for the plan that tries the short way first; None when the overload has none.

    Args:
        plan: of an overload that draws no random numbers.
        run: `execute.run`.
    """
    arguments = plan.op._schema.arguments
    needed = [a for a in arguments if not a.has_default_value()]
    kinds = dict(plan.params)
    if plan.out or len(plan.returns) != 1 or len(needed) not in (1, 2) or list(arguments[:len(needed)]) != needed \
            or kinds.get(arguments[0].name) != "tensor" or plan.writes not in ((), ((arguments[0].name, 0),)):
        return None
    table: Table = {}
    _tables.append(table)
    if len(needed) == 1:
        return _of_one(plan, run, table)
    return _of_two(plan, run, table) if kinds.get(arguments[1].name) in ("tensor", "traced") else None


def _of_one(plan: Plan, run: Callable[..., Any], table: Table) -> Callable[..., Any]:
    def one(a: Tensor, *rest: Any, **named: Any) -> Any:
        if rest or named:
            return run(plan, (a, *rest), named)
        held = getattr(a.untyped_storage(), "_tpu_buffer", None)
        if held is None:
            return run(plan, (a,), named)
        kind = held.kind
        if a.shape != kind.shape or a.dtype is not kind.torch_dtype or not a.is_contiguous():
            return run(plan, (a,), named)
        entry = table.get(kind)
        if entry is None:
            return run(plan, (a,), named, table=table, slot=kind)
        result = _launch(entry, a, [held], ())
        return run(plan, (a,), named) if result is None else result

    return one


def _of_two(plan: Plan, run: Callable[..., Any], table: Table) -> Callable[..., Any]:
    def two(a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        if rest or named or isinstance(a, _NUMBERS):  # `5 // x` hands on the number itself
            return run(plan, (a, b, *rest), named)
        held = getattr(a.untyped_storage(), "_tpu_buffer", None)
        if held is None:
            return run(plan, (a, b), named)
        kind = held.kind
        if a.shape != kind.shape or a.dtype is not kind.torch_dtype or not a.is_contiguous():
            return run(plan, (a, b), named)
        what = type(b)
        slot: Any
        numbers: tuple[Any, ...] = ()
        if what is float or what is int:
            slot = (kind, what)
            entry = table.get(slot)
            if entry is None:
                return run(plan, (a, b), named, table=table, slot=slot)
            buffers, numbers = [held], (transfer.number(b),)
        elif isinstance(b, Tensor):
            other = getattr(b.untyped_storage(), "_tpu_buffer", None)
            if other is None:
                # PyTorch hands on a Python number as a 0-d tensor of 64 bits.
                if b.dtype not in _NUMBER_DTYPES or b.dim() or not b.is_cpu:
                    return run(plan, (a, b), named)
                slot = (kind, b.dtype)
                buffers, numbers = [held], (transfer.number(b.item()),)
            elif other is held:
                if b is not a:
                    return run(plan, (a, b), named)
                slot = kind
                buffers = [held]
            else:
                kind = other.kind
                if b.shape != kind.shape or b.dtype is not kind.torch_dtype or not b.is_contiguous():
                    return run(plan, (a, b), named)
                slot = (held.kind, kind)
                buffers = [held, other]
            entry = table.get(slot)
            if entry is None:
                return run(plan, (a, b), named, table=table, slot=slot)
        else:
            return run(plan, (a, b), named)
        result = _launch(entry, a, buffers, numbers)
        return run(plan, (a, b), named) if result is None else result

    return two


def _launch(entry: Entry, a: Tensor, buffers: list[buffer.Buffer], numbers: tuple[Any, ...]) -> Tensor | None:
    """The result; None when this entry does not serve after all."""
    if entry.precision is not None and entry.precision != torch.get_float32_matmul_precision():
        return None
    kind = entry.kind
    if kind is None and buffers[0].shared:  # it was made to take over the argument's memory
        return None
    if batch.on:
        result = batch.record(entry.node, buffers, numbers)[0]
        if kind is None:
            buffers[0].postpone(buffers[0].kind, result)
            return a
    else:
        program = entry.program
        if program is None:
            program = entry.program = entry.node.program()
        result = program([*[held.array() for held in buffers], *numbers])[0]
        if kind is None:
            buffers[0].replace(result)
            return a
    tensor = entry.template.make()  # type: ignore[union-attr]
    tensor.untyped_storage()._tpu_buffer = buffer.Buffer(kind, result)  # type: ignore[union-attr]
    return tensor
