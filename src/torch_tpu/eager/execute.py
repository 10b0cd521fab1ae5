"""Runs one operator on device tensors: a cached executable, keyed by the operator, its static arguments and each
tensor's (array shape, window, dtype). Views are folded into the executable; writes give the storage a new array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from ..lowering import context, promotion, strided, table
from ..runtime import debug, dtypes, executable, transfer
from ..tensor import buffer, torch_door
from . import batch, bookkeeping, bounds, creation, oracle, overlap, quick
from .plan import MISSING, Plan

Tensor = torch.Tensor


class Ref:
    """A tensor argument inside a key: which buffer, and the window on it."""

    __slots__ = ("dtype", "index", "view")

    def __init__(self, index: int, view: strided.View, dtype: np.dtype) -> None:
        self.index, self.view, self.dtype = index, view, dtype


class Number:
    """A number argument that is an input of the program: which input."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(slots=True)
class Fresh:
    """A result that is a new tensor: which output, and what it becomes."""

    position: int
    template: torch_door.Template
    kind: buffer.Kind


@dataclass(slots=True)
class Compiled:
    """An executable with what its outputs mean."""

    node: batch.Node
    program: executable.Executable | None  # None until it runs alone
    fresh: list[Any]  # per result: None, a Fresh, or a list of those
    written: list[tuple[int, int]]  # (buffer index, output index)
    only: Fresh | None = None  # the one result, where there is only one and nothing is written
    short: quick.Entry | None = None  # for calls whose tensors cover their whole memory


class Call:
    """The arguments of one call, taken apart: a hashable key, and the arrays to feed."""

    __slots__ = ("buffers", "key", "memo", "numbers")

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.buffers: list[buffer.Buffer] = []
        self.memo: dict[int, int] = {}
        self.numbers: list[tuple[Any, np.dtype, bool]] = []  # value, dtype, weakly typed

    def add_tensor(self, tensor: Tensor, plan: Plan) -> None:
        held = getattr(tensor.untyped_storage(), "_tpu_buffer", None)
        if held is None:
            self._add_host(tensor, plan)
            return
        index = self.memo.get(id(held))
        if index is None:
            index = self.memo[id(held)] = len(self.buffers)
            self.buffers.append(held)
        self.key.append((index, held.kind, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))

    def add_target(self, tensor: Tensor, plan: Plan) -> None:
        if buffer.of(tensor) is None:
            raise mixed_devices(tensor, plan.op)
        self.add_tensor(tensor, plan)
        self.key.append(self.buffers[self.key[-1][0]].shared)

    def _add_host(self, tensor: Tensor, plan: Plan) -> None:
        if tensor.device.type == "cpu" and tensor.dim() == 0:
            kind = dtypes.to_numpy(tensor.dtype)
            self.key.append(("host", kind))
            self.numbers.append((_item(tensor), kind, False))
            return
        if tensor.device.type == "tpu":
            raise RuntimeError(
                f"{plan.op}: a tpu tensor of shape {tuple(tensor.shape)} has no device memory behind it (its storage "
                "was made outside torch_tpu); make it with torch.empty(..., device='tpu') or .to('tpu')")
        raise mixed_devices(tensor, plan.op)

    def add_number(self, value: Any) -> None:
        if value is None:
            self.key.append(None)
            return
        kind = type(value)
        self.key.append(kind)
        self.numbers.append((value, _NUMBER_KIND[kind], True))

    def add_static(self, value: Any) -> None:
        if isinstance(value, list):
            value = tuple(value)
        # 1, 1.0 and True are equal keys but not equal programs.
        self.key.append((type(value), value) if isinstance(value, _NUMBERS) else value)


_NUMBER_KIND: dict[type, np.dtype] = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64),
                                      complex: np.dtype(np.complex128)}


_NUMBERS = (bool, int, float)


def _item(tensor: Tensor) -> Any:
    return tensor.resolve_conj().resolve_neg().item()


def mixed_devices(tensor: Tensor, op: Any) -> RuntimeError:
    """torch's own message for operands on two devices."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, tpu:0 and {tensor.device}! "
        f"({op}, an argument of shape {tuple(tensor.shape)}); move it with .to('tpu')")


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides

_cache: dict[tuple[Any, ...], Compiled | list[Layout]] = {}


def run(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], key: Any = None, table: quick.Table | None = None,
        slot: Any = None) -> Any:
    """Runs an overload.

    Args:
        plan: how.
        args, kwargs: the overload's own arguments; tensors on the device, 0-d CPU tensors, numbers.
        key: a uint32[2] JAX array for a random operator.
        table, slot: where to enter the short way of the next such call, if it can have one.
    """
    if key is None and not plan.out and args and not plan.entry.users and bookkeeping.on():
        first = args[0]
        if first.__class__ is list and first:
            first = first[0]
        if isinstance(first, Tensor) and first.dtype in bookkeeping.KINDS:
            result = bookkeeping.run(plan.op, args, kwargs, plan.written)
            if result is not NotImplemented:
                return result
    call = Call()
    if debug.on():
        bounds.check(plan.op, _given(plan, args, kwargs))
    count = len(args)
    for position, name, kind, default in plan.slots:
        value = args[position] if position < count else kwargs.get(name, default)
        if kind == "tensor" or kind == "traced":
            if isinstance(value, Tensor):
                call.add_tensor(value, plan)
            elif value is MISSING:
                call.key.append(None if kind == "tensor" else "default")
            else:
                call.add_number(value)
        elif kind == "static":
            if value is MISSING:
                call.key.append("default")
            else:
                call.add_static(value)
        elif kind == "tensors":
            if value is None or value is MISSING:
                call.key.append(None)
            else:
                call.key.append(len(value))
                for item in value:
                    if item is None:
                        call.key.append(None)
                    else:
                        call.add_tensor(item, plan)
        elif kind == "traced_list":
            call.key.append(len(value))
            for item in value:
                call.add_number(item)
        elif value is not MISSING:  # memory_format
            call.key.append(value)
    targets: list[Tensor] = []
    given = _given(plan, args, kwargs) if plan.writes else None
    for name, _ in plan.writes:
        target = given[name]  # type: ignore[index]
        for tensor in target if isinstance(target, list | tuple) else (target,):
            if tensor is not None:
                targets.append(tensor)
                call.add_target(tensor, plan)
    full_key = (plan.op, context.key(), *call.key)
    compiled = _cache.get(full_key)
    if compiled is None:
        compiled = _build(plan, given or _given(plan, args, kwargs), call, targets, key is not None)
        _cache[full_key] = compiled
    if isinstance(compiled, list):  # layouts of the out= tensors, which must be changed first
        _resize_outputs(targets, compiled)
        return run(plan, args, kwargs, key)
    extra = [transfer.scalar(number, dtype) for number, dtype, _ in call.numbers]
    if key is not None:
        extra.append(key)
    outputs: list[Any]
    if batch.on and not debug.on():
        outputs = batch.record(compiled.node, call.buffers, extra)
        for index, position in compiled.written:
            call.buffers[index].postpone(compiled.node.kinds[position], outputs[position])
        if table is not None and compiled.short is not None:
            table[slot] = compiled.short
    else:
        program = compiled.program
        if program is None:
            program = compiled.program = compiled.node.program()
        arrays = [held.array() for held in call.buffers]
        arrays += extra
        outputs = program(arrays)
        for index, position in compiled.written:
            call.buffers[index].rebind(outputs[position])
        if debug.on():
            for array in outputs:
                array.block_until_ready()
        elif table is not None and compiled.short is not None:
            table[slot] = compiled.short
    if compiled.only is not None:
        only = compiled.only
        return buffer.lay(only.template, only.kind, outputs[only.position])
    results = [_wrap(spec, outputs) for spec in compiled.fresh]
    values = [given[what] if where == "argument" else results[what]  # type: ignore[index]
              for where, what in plan.returns]
    return values[0] if len(values) == 1 else (None if not values else tuple(values))


def _given(plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name."""
    given = dict(plan.defaults)
    given.update(zip(plan.names, args))
    given.update(kwargs)
    return given


def _wrap(spec: Any, outputs: list[Any]) -> Any:
    if spec is None:
        return None
    if isinstance(spec, list):
        return [_wrap(item, outputs) for item in spec]
    return buffer.lay(spec.template, spec.kind, outputs[spec.position])


def _resize_outputs(targets: list[Tensor], layouts: list[Layout]) -> None:
    for tensor, (sizes, strides) in zip(targets, layouts):
        if tuple(tensor.shape) != sizes:
            creation.resize_output_(tensor, sizes, tensor.device)
            if tensor.stride() != strides and buffer.dense_order(sizes, strides) is not None:
                tensor.as_strided_(sizes, strides)


def rebuild(plan: Plan, given: dict[str, Any], call: Call, tensor: Any,
            number: Any) -> tuple[list[Any], dict[str, Any]]:
    """The functional overload's arguments with every tensor mapped by `tensor(key)` and number by `number(index)`."""
    keys = iter(call.key)
    counter = iter(range(len(call.numbers)))

    def one(value: Any) -> Any:
        item = next(keys)
        if item is None:
            return None
        if isinstance(item, tuple) and item[0] == "host":
            return number(next(counter), value)
        if isinstance(item, type):
            return number(next(counter), value)
        return tensor(item, value)

    arguments: list[Any] = []
    for name, kind in plan.params:
        value = given.get(name, MISSING)
        if kind in ("tensor", "traced"):
            if value is MISSING:
                next(keys)
                arguments.append((name, MISSING))
            else:
                arguments.append((name, one(value)))
        elif kind in ("tensors", "traced_list"):
            if value is None or value is MISSING:
                next(keys)
                arguments.append((name, MISSING if value is MISSING else None))
            else:
                next(keys)
                arguments.append((name, [one(item) for item in value]))
        elif kind == "static":
            next(keys)
            arguments.append((name, value))
        else:
            if name == "memory_format" and value is not MISSING:
                next(keys)
            arguments.append((name, MISSING))
    schema = plan.functional._schema.arguments
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument, (name, value) in zip(schema, arguments):
        if value is MISSING:
            value = argument.default_value if argument.has_default_value() else None
            if name in table.PLACEMENT:
                continue
            if name == "dtype" and isinstance(value, int):
                value = torch.int64  # schemas hold a default dtype by its number, and only ever Long
        if isinstance(value, torch.dtype):
            value = dtypes.to_numpy(value)
        if argument.kwarg_only:
            named[name] = value
        else:
            positional.append(value)
    return positional, named


def _check_cast(result: Tensor, target: Tensor) -> None:
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(f"result type {_name(result.dtype)} can't be cast to the desired output type "
                           f"{_name(target.dtype)}")


def _build(plan: Plan, given: dict[str, Any], call: Call, targets: list[Tensor],
           random: bool) -> Compiled | list[Layout]:
    expected = oracle.expect(plan, given)
    if plan.out and expected is not None:
        metas = oracle.flat(expected)
        if len(metas) > len(plan.writes):
            metas = [metas[index] for _, index in plan.writes]
        if len(metas) == len(targets) and any(t.shape != m.shape for t, m in zip(targets, metas)):
            return [(tuple(m.shape), m.stride()) for m in metas]
        for tensor, meta in zip(targets, metas):
            _check_cast(meta, tensor)
    elif len(targets) == 1 and not plan.fresh and isinstance(expected, Tensor):
        _check_cast(expected, targets[0])  # the Meta kernels of in-place forms do not all check
    overlap.check(plan, given, targets)
    target_views = []
    for tensor in targets:
        view = strided.of(tensor)
        target_views.append((call.memo[id(buffer.of(tensor))], view, dtypes.to_numpy(tensor.dtype)))
    count = len(call.buffers)
    numbers = len(call.numbers)
    layout: dict[str, Any] = {}

    def program(*arrays: Any) -> list[Any]:
        def tensor(item: Any, _: Any) -> Any:
            index, _, dtype, sizes, strides, offset = item
            return strided.read(arrays[index], strided.View(sizes, strides, offset), dtypes.to_numpy(dtype))

        def number(index: int, _: Any) -> Any:
            return arrays[count + index]

        positional, named = rebuild(plan, given, call, tensor, number)
        if plan.entry.random:
            named["key"] = arrays[count + numbers]
        result = plan.entry.fn(*positional, **named)
        results = list(result) if isinstance(result, tuple) else [result]
        if len(plan.functional._schema.returns) == 1 and isinstance(result, list):
            results = [list(result)]
        outputs: list[Any] = []
        fresh = []
        for position in plan.fresh:
            fresh.append(_emit(results[position], _at(expected, position), outputs))
        layout["fresh"] = fresh
        written: list[tuple[int, int]] = []
        current: dict[int, Any] = {}
        values: list[Any] = []
        for name, position in plan.writes:
            if isinstance(given[name], list | tuple):
                values += [v for v, t in zip(results[position], given[name]) if t is not None]
            elif given[name] is not None:
                values.append(results[position])
        for (index, view, dtype), value in zip(target_views, values):
            base = current.get(index, arrays[index])
            value = promotion.cast(value, dtype)
            if value.shape != view.sizes:
                value = jax.numpy.broadcast_to(value, view.sizes)
            current[index] = strided.write(base, view, value)
        for index, value in current.items():
            written.append((index, len(outputs)))
            outputs.append(value)
        layout["written"] = written
        return outputs

    avals = [jax.ShapeDtypeStruct(held.shape, held.dtype) for held in call.buffers]
    avals += [jax.ShapeDtypeStruct((), kind, weak_type=weak) for _, kind, weak in call.numbers]
    if random:
        avals.append(jax.ShapeDtypeStruct((2,), np.uint32))
    donate = sorted({index for index, _, _ in target_views if not call.buffers[index].shared})
    name = str(plan.op)
    consulted = context.Consulted.count
    try:
        recorded = executable.Recorded(program, avals, name, donate)
    except (TypeError, ValueError, ZeroDivisionError, NotImplementedError) as error:
        # A kernel of PyTorch's raises RuntimeError; a TypeError would make Python's operators look for another way.
        kind = NotImplementedError if isinstance(error, NotImplementedError) or "dtype" in str(error) else RuntimeError
        raise kind(f"{name} on tpu, with {_describe(call)}: {error}") from error
    recorded.pins = [(position, index) for index, position in layout["written"]]
    if plan.functional._opname.endswith("_like") and [r.shape for r in recorded.results] == [avals[0].shape]:
        recorded.pins = [(0, 0)]  # on a mesh: spread as its pattern
    node = batch.Node(recorded, name, donate)
    if batch.on:
        node.release()
    compiled = Compiled(node, None if batch.on else node.program(), layout["fresh"], layout["written"])
    if not plan.writes and len(plan.returns) == 1 and len(compiled.fresh) == 1 and isinstance(compiled.fresh[0], Fresh):
        compiled.only = compiled.fresh[0]
    precision = torch.get_float32_matmul_precision() if context.Consulted.count > consulted else None
    compiled.short = _short(compiled, call, precision)
    return compiled


def _short(compiled: Compiled, call: Call, precision: str | None) -> quick.Entry | None:
    """The short way, where neither a global setting but the precision, nor a layout, nor a second result matters."""
    kinds = [held.kind for held in call.buffers]
    if {kind.torch_dtype for kind in kinds} - _SHORT_DTYPES or len({kind.torch_dtype for kind in kinds}) != 1:
        return None
    if compiled.only is not None:
        made = compiled.only
        return quick.Entry(compiled.node, made.kind, made.template, precision)
    if compiled.written == [(0, 0)] and not compiled.fresh and not call.buffers[0].shared:
        return quick.Entry(compiled.node, None, None, precision)
    return None


_SHORT_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


def _describe(call: Call) -> str:
    shapes = [f"{tuple(item[3])} {item[2]}" for item in call.key
              if isinstance(item, tuple) and len(item) == 6 and isinstance(item[0], int)]
    return ", ".join(shapes) or "no tensors"


def _name(dtype: torch.dtype) -> str:
    names = {torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.int64: "Long",
             torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte", torch.bool: "Bool",
             torch.bfloat16: "BFloat16", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble"}
    return names.get(dtype, str(dtype))


def _at(expected: Any, position: int) -> Any:
    if expected is None:
        return None
    if isinstance(expected, tuple):
        return expected[position] if position < len(expected) else None
    return expected if position == 0 else None


def _emit(value: Any, meta: Any, outputs: list[Any]) -> Any:
    """Appends a result to the program's outputs in memory order; returns where it is and its sizes and strides."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [_emit(item, meta[i] if isinstance(meta, list | tuple) else None, outputs)
                for i, item in enumerate(value)]
    if promotion.is_number(value):
        value = promotion.cast(value, promotion.torch_dtype(value))
    sizes = tuple(value.shape)
    strides = buffer.contiguous(sizes)
    if isinstance(meta, Tensor):
        value = promotion.cast(value, meta.dtype)
        if tuple(meta.shape) != sizes:
            raise ValueError(f"the lowering gives shape {sizes}, PyTorch says {tuple(meta.shape)}")
        if meta.stride() != strides and 0 not in sizes:
            order = buffer.dense_order(sizes, meta.stride())
            if order is not None:
                strides = meta.stride()
                value = value.transpose(order)
    outputs.append(value)
    kind = buffer.kind(tuple(value.shape), value.dtype)
    return Fresh(len(outputs) - 1, torch_door.template(sizes, strides, kind.torch_dtype), kind)


def clear() -> None:
    """Forgets the compiled operators of this process."""
    batch.clear()
    _cache.clear()
    quick.clear()


def cached() -> int:
    return len(_cache)
