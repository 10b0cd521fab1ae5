"""Runs a training step once without computing: every operator on the device goes onto a tape instead.

Autograd, hooks and the optimizer's Python code run as in eager mode, on real tensors that have sizes and no data. A
mode below autograd sees the operators; a second one above it sees what Python does with tensors (`p.grad = None`,
`float(loss)`).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..distributed import captured
from ..distributed import graph as collectives
from ..distributed.captured import Collective
from ..eager import execute, fallback, oracle, overlap, random
from ..eager import plan as plans
from ..lowering import strided
from ..runtime import dtypes, errors, jax_door
from ..tensor import buffer, torch_door
from . import symbol, tape
from .tape import Entry, Read, Symbolic, Value, Written

Tensor = torch.Tensor
aten = torch.ops.aten

_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_BLANK = {"aten.empty.memory_format", "aten.empty_strided.default", "aten.empty_like.default",
          "aten.new_empty.default", "aten.new_empty_strided.default", "aten.zeros.default", "aten.zeros_like.default",
          "aten.new_zeros.default"}
# Take no more than a layout from their first argument. With where the value to fill in is, if it is given.
_LIKE = {"aten.ones_like.default": 1, "aten.new_ones.default": 1, "aten.full_like.default": None,
         "aten.new_full.default": None}
_HOST_RANGES = {"aten.arange.default", "aten.arange.start", "aten.arange.start_step"}
# What Python may not ask of a tensor whose value is not known yet.
_NEEDS_VALUE = {"__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "tolist", "numpy",
                "__array__", "__repr__", "__format__", "__str__", "__dlpack__"}


class Traced:
    """The memory of a tensor made while a step is captured. Hangs on the storage, where a buffer will."""

    __slots__ = ("__weakref__", "first", "inside", "value")

    def __init__(self, value: Value, inside: bool) -> None:
        self.first = value
        self.value = value
        self.inside = inside  # made in optimizer.step


class External:
    """Memory that was there before the step."""

    __slots__ = ("buffer", "first", "tensor", "value")

    def __init__(self, held: buffer.Buffer, tensor: Tensor) -> None:
        self.buffer = held
        self.tensor = tensor
        self.first = self.value = Value(held.shape, held.dtype)


class HostInput:
    """A CPU tensor from outside that the step copies to the device."""

    def __init__(self, tensor: Tensor, value: Value) -> None:
        self.tensor = tensor
        self.value = value


def where() -> str:
    """File and line of the user's code that runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OUTSIDE) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"


def traced(tensor: Tensor) -> Traced | None:
    return getattr(tensor.untyped_storage(), "_tpu_traced", None)


class Recorder(TorchDispatchMode):
    """The tape of one run of a step, and what the step touched."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = tape.Tape()
        self.externals: dict[int, External] = {}
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}  # a parameter, its gradient before the step
        self.made: list[weakref.ref[Any]] = []  # storages made by the step
        self.host_inputs: list[HostInput] = []
        self.host_values: list[tuple[Tensor, Any]] = []  # numbers read from CPU tensors of the outside
        self.host_made: dict[int, tuple[Any, bool]] = {}  # CPU storages of the step; whether they depend on the outside
        self.numbers: list[Any] = []  # values now of the numbers that are inputs
        self.assumptions: list[tuple[symbol.Expression, Any]] = []
        self.draws: list[torch.Generator | None] = []
        self.seen_keys: dict[bytes, int] = {}
        self.states: dict[int, tuple[Any, Tensor]] = {}  # of generators before the step
        self.checks: list[tuple[Value, Any, Callable[[Tensor], None]]] = []  # read after the step, on the host
        self.journal: list[tuple[Any, Value]] | None = None
        self.in_optimizer = False
        self.paused = False
        self.scope: Callable[[], str] = str  # names what runs now (aot/naming.py)
        self._begin = torch_door.moment()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What is done here is no part of the step; tensors made here were there before it."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
            self._begin = torch_door.moment()

    # -- values and tensors

    def new_tensor(self, shape: Any, strides: Any, dtype: torch.dtype, value: Value) -> Tensor:
        tensor = torch_door.new_tensor(tuple(shape), tuple(strides), dtype)
        storage: Any = tensor.untyped_storage()
        storage._tpu_traced = Traced(value, self.in_optimizer)
        self.made.append(weakref.ref(storage))
        return tensor

    def literal(self, tensor: Tensor) -> Tensor:
        """A device tensor with the values a CPU tensor has now."""
        array = tensor.detach().contiguous()
        kind = dtypes.to_numpy(array.dtype)
        if array.dtype == torch.bfloat16 or kind.kind == "V" or "float8" in str(array.dtype):
            host = array.view(torch.uint8 if kind.itemsize == 1 else torch.int16).numpy().copy().view(kind)
        else:
            host = array.numpy().copy()
        return self.new_tensor(tensor.shape, buffer.contiguous(tensor.shape), tensor.dtype,
                               Value(tensor.shape, kind, literal=host))

    def adopt(self, tensor: Tensor) -> External:
        """Takes a tensor made just now as one that was there before."""
        held = buffer.of(tensor)
        assert held is not None
        found = self.externals.get(id(held))
        if found is None:
            found = self.externals[id(held)] = External(held, tensor)
        return found

    def owner(self, tensor: Tensor) -> Traced | External:
        storage: Any = tensor.untyped_storage()
        found = getattr(storage, "_tpu_traced", None)
        if found is not None:
            return found
        held = getattr(storage, "_tpu_buffer", None)
        if held is None:
            raise RuntimeError(f"a tpu tensor of shape {tuple(tensor.shape)} has no device memory behind it")
        known = self.externals.get(id(held))
        if known is not None:
            return known
        if torch_door.made_since(self._begin, storage.data_ptr()):  # by PyTorch's C++ code, out of the mode's sight
            value = Value(held.shape, held.dtype, literal=_numpy(held.array()))
            storage._tpu_traced = Traced(value, self.in_optimizer)
            self.made.append(weakref.ref(storage))
            del storage._tpu_buffer
            return storage._tpu_traced
        return self.adopt(tensor)

    def track(self, parameter: Tensor) -> None:
        """Remembers the gradient a parameter has before the step."""
        if id(parameter) not in self.leaves:
            grad = parameter.grad
            if grad is not None and traced(grad) is not None:
                raise errors.CaptureError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} comes from a graph that was built "
                    "before the step; run the forward pass inside the step")
            self.leaves[id(parameter)] = (parameter, grad)

    def read(self, tensor: Tensor) -> Read:
        if tensor.is_conj() or tensor.is_neg():
            plain = self._plain(tensor)
            return self.read(plain)
        return Read(self.owner(tensor).value, strided.of(tensor), dtypes.to_numpy(tensor.dtype))

    def _plain(self, tensor: Tensor) -> Tensor:
        if tensor.is_conj():
            return self.run(plans.make(aten.conj_physical.default), (tensor.conj(),), {})
        return self.run(plans.make(aten.neg.default), (torch._neg_view(tensor),), {})

    def number(self, value: Any) -> Any:
        """A float that is an input of the program from now on."""
        self.numbers.append(value)
        return symbol.wrap(symbol.Node(("number", len(self.numbers) - 1), "float", value, self._assume))

    def filled(self, number: Any) -> Tensor:
        """A number as a 0-d tensor."""
        return self.run(plans.make(aten.full.default), ([], number), {"dtype": torch.float64,
                                                                      "device": torch.device("tpu")})

    def choose(self, condition: Tensor, journal: list[tuple[Any, Value]]) -> None:
        """Takes back what was written since the journal began, where the condition holds."""
        read = self.read(condition)
        seen: set[int] = set()
        for owner, old in journal:
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            whole = strided.View(old.shape, buffer.contiguous(old.shape), 0)
            entry = Entry("select", None, [read, Read(old, whole, old.dtype), Read(owner.value, whole, old.dtype)], {},
                          where(), select=True)
            entry.made.append(Value(old.shape, old.dtype, entry))
            self.tape.entries.append(entry)
            self.replace(owner, entry.made[0])

    def _assume(self, expression: symbol.Expression, value: Any) -> None:
        if not symbol.items(expression):
            self.assumptions.append((expression, value))

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            raise errors.CaptureError(f"{func} at {where()}: a collective of CPU tensors would run only once, while "
                                      "the step is captured. Move the tensors to the device, or do it outside the step")
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        here = any(leaf.device.type == "tpu" for leaf in leaves)
        if not here and not (device is not None and torch.device(device).type == "tpu"):
            return self._on_host(func, args, kwargs, leaves)
        if any(type(leaf) not in (Tensor, torch.nn.Parameter) and hasattr(type(leaf), "__torch_dispatch__")
               and type(leaf).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for leaf in leaves):
            return NotImplemented
        for leaf in leaves:
            if leaf.requires_grad and leaf.is_leaf and leaf.device.type == "tpu" and traced(leaf) is None:
                self.track(leaf)
        try:
            return self._on_device(func, args, kwargs)
        except jax.errors.JAXTypeError as error:
            raise errors.CaptureError(f"{func}, called at {where()}: {error}") from error

    def _on_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = str(func)
        special = _SPECIAL.get(name)
        if special is not None:
            return special(self, *args, **kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "tpu":
            from ..eager import creation

            return creation.elsewhere(func, args, kwargs)
        if name in _BLANK:
            return self._blank(func, args, kwargs)
        if name in _LIKE:
            return self._like(func, args, kwargs, _LIKE[name])
        if name in _HOST_RANGES:
            return self.literal(func(*args, **{**_plain_numbers(kwargs), "device": "cpu"}))
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns) \
                or (torch.Tag.inplace_view in func.tags and not name.startswith("aten.resize")):
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
                with self:  # whole only in inference mode; contiguous and reshape may copy
                    return func.decompose(*args, **kwargs)
            return func(*args, **kwargs)
        if (torch.Tag.dynamic_output_shape in func.tags and func not in _INDEXING) or name in _DATA_DEPENDENT:
            raise errors.CaptureError(
                f"{func} at {where()}: the size or the branch it leads to depends on values that the step computes. "
                "Use a form of fixed size (torch.where, masked_fill, topk), or do it outside the step")
        if func.namespace == "_c10d_functional":
            return self._functional_collective(func, args)
        plan = plans.make(func)
        if plan is not None:
            return self.run(plan, args, kwargs)
        found = fallback.decomposition(func)
        if found is not None:
            with self:
                result = found(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        raise errors.CaptureError(f"{func} at {where()} has no lowering for tpu (in eager mode it would run on the "
                                  "CPU), so it cannot be part of a compiled step")

    def run(self, plan: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Puts an operator on the tape; its results are tensors without data."""
        given = dict(plan.defaults)
        given.update(zip(plan.names, args))
        given.update(kwargs)
        hinted = pytree.tree_map_only((torch.SymFloat, torch.SymInt, torch.SymBool), symbol.hint, given)
        expected = oracle.expect(plan, hinted)
        targets = [tensor for name, _ in plan.writes for tensor in (
            given[name] if isinstance(given[name], list | tuple) else (given[name],)) if tensor is not None]
        for target in targets:
            if target.device.type != "tpu":
                raise execute.mixed_devices(target, plan.op)
            if target.is_conj() or target.is_neg():
                raise errors.CaptureError(f"{plan.op} at {where()} writes a conjugated view; use resolve_conj()")
        if plan.out and expected is not None:
            metas = oracle.flat(expected)
            if len(metas) == len(targets) and any(t.shape != m.shape for t, m in zip(targets, metas)):
                raise errors.CaptureError(f"{plan.op} at {where()}: out= of another shape than the result")
        overlap.check(plan, given, targets)
        key = self._key(given.get("generator")) if plan.entry.random else None
        positional, named = tape.arguments(plan, given, lambda value, kind: self._argument(value, kind, plan))
        entry = Entry(str(plan.functional), plan.entry, positional, named, where(), key, scope=self.scope())
        shapes = expected if expected is not None else self._shapes(entry, len(plan.functional._schema.returns))
        many = len(plan.functional._schema.returns) > 1
        results: dict[int, Any] = {}
        for position in plan.fresh:
            meta = shapes[position] if isinstance(shapes, tuple) and many else shapes
            results[position] = self._fresh(entry, (position,) if many else (), meta, isinstance(meta, list))
        for name, position in plan.writes:
            target = given[name]
            if target is None:
                continue
            path = (position,) if many else ()
            for index, each in enumerate(target) if isinstance(target, list | tuple) else ((None, target),):
                if each is not None:
                    self._write(entry, path if index is None else (*path, index), each)
        self.tape.entries.append(entry)
        values = [given[what] if kind == "argument" else results[plan.fresh[what]] for kind, what in plan.returns]
        return values[0] if len(values) == 1 else (None if not values else tuple(values))

    def collective(self, what: Collective, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Puts a collective on the tape, whose results go to the outputs."""
        entry = Entry(what.text, None, [self.read(tensor) for tensor in inputs], {}, where(), collective=what)
        for position, output in enumerate(outputs):
            self._write(entry, (position,), output)
        self.tape.entries.append(entry)

    def _functional_collective(self, func: Any, args: Any) -> Any:
        if collectives.waits(str(func)):
            return args[0]
        what = captured.functional(func, args)
        if what is None:
            raise errors.CaptureError(f"{func} at {where()} cannot be part of a compiled step; do it outside the step")
        entry = Entry(what.text, None, [self.read(args[0])], {}, where(), collective=what)
        like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device="meta")
        made = self._fresh(entry, (0,), func(like, *args[1:]), False)
        self.tape.entries.append(entry)
        return made

    def _fresh(self, entry: Entry, path: tuple[int, ...], meta: Any, many: bool) -> Any:
        if meta is None:
            return None
        if many:
            return [self._fresh(entry, (*path, index), item, False) for index, item in enumerate(meta)]
        spec, stored, strides = tape.fresh(meta.shape, meta.stride(), dtypes.to_numpy(meta.dtype))
        value = Value(stored, spec.dtype, entry)
        entry.pick.append((path, spec))
        entry.made.append(value)
        return self.new_tensor(spec.shape, strides, meta.dtype, value)

    def _write(self, entry: Entry, path: tuple[int, ...], target: Tensor) -> None:
        owner = self.owner(target)
        entry.pick.append((path, Written(owner.value, strided.of(target), dtypes.to_numpy(target.dtype))))
        # A write into part of a value, after an earlier one of the same operator, builds on that one.
        value = Value(owner.value.shape, owner.value.dtype, entry)
        entry.made.append(value)
        self.replace(owner, value)

    def replace(self, owner: Traced | External, value: Value) -> None:
        if self.journal is not None:
            self.journal.append((owner, owner.value))
        owner.value = value

    def _shapes(self, entry: Entry, returns: int) -> Any:
        """Shapes where PyTorch has no answer: those the lowering gives."""
        def run(*arrays: Any) -> Any:
            given = dict(zip(reads, arrays))

            def leaf(expression: symbol.Expression) -> Any:
                return jax_door.weak(np.float64(1), float)

            result = tape.call(entry, lambda read: strided.read(given[read.value], read.view, read.dtype),
                               lambda number: symbol.evaluate(number.expression, leaf, True),
                               {entry.key: np.zeros(2, np.uint32)})
            return tape.results(returns, result)

        reads = list(dict.fromkeys(read.value for read in entry.reads()))
        with jax_door.x64():
            shapes = jax.eval_shape(run, *(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in reads))

        def meta(value: Any) -> Any:
            if value is None:
                return None
            if isinstance(value, list | tuple):
                return [meta(item) for item in value]
            return torch.empty(value.shape, dtype=dtypes.to_torch(value.dtype), device="meta")

        metas = [meta(value) for value in shapes]
        return tuple(metas) if returns > 1 else metas[0]

    def _argument(self, value: Any, kind: str, plan: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._argument(item, kind, plan) for item in value]
        if isinstance(value, Tensor):
            if value.device.type == "tpu":
                if plan.functional in _INDEXING and value.dtype in (torch.bool, torch.uint8) and kind == "tensors":
                    raise errors.CaptureError(
                        f"{plan.op} at {where()}: indexing with a mask gives a size that depends on values; use "
                        "torch.where or masked_fill")
                return self.read(value)
            if (value.dim() == 0 and value.device.type == "cpu") or (plan.functional in _INDEXING
                                                                     and kind == "tensors"):
                return self.read(self.upload(value))
            raise execute.mixed_devices(value, plan.op)
        at = symbol.expression(value)
        if at is None:
            return value
        if kind == "static":
            return value.node._decide()
        return Symbolic(at)

    def _key(self, generator: torch.Generator | None) -> int:
        """The number of a random key. Drawn for real, so that a replay (checkpointing restores the generator) draws
        the same key, and is given the same number."""
        source: Any = generator if generator is not None else random.default_generator()
        if source._cdata not in self.states:  # not id(): each operator is handed another object for one generator
            self.states[source._cdata] = (source, source.get_state())
        drawn = random.draw(generator).tobytes()
        found = self.seen_keys.get(drawn)
        if found is None:
            found = self.seen_keys[drawn] = len(self.draws)
            self.draws.append(generator)
            self.tape.keys = len(self.draws)
        return found

    def _layout(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        def meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return symbol.hint(value) if symbol.expression(value) is not None else value

        return func(*(meta(value) for value in args), **{**kwargs, "device": "meta"})

    def _blank(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        like = self._layout(func, args, kwargs)
        spec, stored, strides = tape.fresh(like.shape, like.stride(), dtypes.to_numpy(like.dtype))
        value = Value(stored, spec.dtype, blank=True)
        held = buffer.of(args[0]) if args and isinstance(args[0], Tensor) else None
        if held is not None and held.shape == value.shape:
            value.pattern = held
        return self.new_tensor(spec.shape, strides, like.dtype, value)

    def _like(self, func: Any, args: Any, kwargs: dict[str, Any], number: Any) -> Tensor:
        like = self._layout(func, args, kwargs)
        plan = plans.make(aten.full.default)
        assert plan is not None
        at = symbol.expression(args[-1]) if number is None else None
        value = number if number is not None else args[-1] if at is None else Symbolic(at)
        entry = Entry("aten.full.default", plan.entry, [list(like.shape), value],
                      {"dtype": dtypes.to_numpy(like.dtype)}, where())
        made = self._fresh(entry, (), like, False)
        self.tape.entries.append(entry)
        return made

    # -- copies and numbers

    def upload(self, tensor: Tensor) -> Tensor:
        """A CPU tensor on the device: an input of every step if it comes from outside, else a constant."""
        known = self.host_made.get(tensor.untyped_storage()._cdata)
        if known is not None:
            if known[1]:
                raise errors.CaptureError(
                    f"a CPU tensor of shape {tuple(tensor.shape)} that the step computes on the host from its inputs "
                    f"goes to the device at {where()}: the host's part would run only once. Move the inputs to the "
                    "device first, or compute it outside the step")
            return self.literal(tensor)
        for held in self.host_inputs:
            if held.tensor is tensor:
                value = held.value
                break
        else:
            value = Value(tensor.shape, dtypes.to_numpy(tensor.dtype))
            self.host_inputs.append(HostInput(tensor, value))
        return self.new_tensor(tensor.shape, buffer.contiguous(tensor.shape), tensor.dtype, value)

    def to_copy(self, tensor: Tensor, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        if tensor.device.type == "tpu" and device is not None and torch.device(device).type == "meta":
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kwargs.get("dtype") or tensor.dtype,
                                       device="meta")
        if tensor.device.type == "tpu" and device is not None and torch.device(device).type != "tpu":
            raise self.needs_value(f"a copy to {device}")
        if tensor.device.type != "tpu":
            tensor = self.upload(tensor)
            if kwargs.get("dtype") in (None, tensor.dtype):
                return tensor
        plan = plans.make(aten._to_copy.default)
        assert plan is not None
        return self.run(plan, (tensor,), kwargs)

    def copy_(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.device.type != "tpu":
            raise self.needs_value("a copy to the CPU")
        if source.device.type != "tpu":
            source = self.upload(source)
        plan = plans.make(aten.copy_.default)
        assert plan is not None
        return target if target is source else self.run(plan, (target, source), {})

    def item(self, tensor: Tensor) -> Any:
        kind = "bool" if tensor.dtype == torch.bool else "float" if tensor.is_floating_point() else "int"
        if tensor.is_complex():
            raise self.needs_value("item() of a complex tensor")
        return symbol.wrap(symbol.Node(("item", self.read(tensor)), kind, None, self._assume))

    def needs_value(self, what: str) -> errors.CaptureError:
        return errors.CaptureError(
            f"{what} at {where()} needs a value that the step has yet to compute; return the tensor from the step and "
            "do it outside")

    def check_later(self, tensor: Tensor, check: Callable[[Tensor], Any]) -> None:
        """A check that may raise an error waits until the step has run."""
        owner = self.owner(tensor)
        self.checks.append((owner.value, (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype),
                            check))

    def batch_norm(self, input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float,
                   eps: float) -> Any:
        if training and mean is None:
            op: Any = aten._native_batch_norm_legit.no_stats
            args: tuple[Any, ...] = (input, weight, bias, training, momentum, eps)
        elif training:
            op, args = aten.native_batch_norm.default, (input, weight, bias, mean, var, training, momentum, eps)
        else:
            op = aten._native_batch_norm_legit_no_training.default
            args = (input, weight, bias, mean, var, momentum, eps)
        return self.run(plans.make(op), args, {})

    def index_put(self, tensor: Tensor, indices: Any, values: Tensor, accumulate: bool = False,
                  unsafe: bool = False, in_place: bool = True) -> Tensor:
        """With one mask and one value it is masked_fill, whose size is known."""
        mask = indices[0] if len(indices) == 1 else None
        if mask is not None and mask.dtype == torch.bool and values.numel() == 1 and not accumulate:
            if mask.device.type != "tpu":
                mask = self.upload(mask)
            mask = mask.reshape(*mask.shape, *[1] * (tensor.dim() - mask.dim()))
            op: Any = aten.masked_fill_.Tensor if in_place else aten.masked_fill.Tensor
            return self.run(plans.make(op), (tensor, mask, values.reshape(())), {})
        op = aten.index_put_.default if in_place else aten.index_put.default
        return self.run(plans.make(op), (tensor, indices, values, accumulate), {})

    # -- the host

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        name = str(func)
        if name == "aten.lift_fresh.default" and self.in_optimizer and args[0].device.type == "cpu" \
                and args[0].dim() == 0 and args[0].is_floating_point():
            return self.literal(args[0])  # an optimizer's step count, which must live on the device
        outside = [t for t in tensors if t.device.type == "cpu" and t.untyped_storage()._cdata not in self.host_made]
        depends = bool(outside) or any(
            self.host_made.get(t.untyped_storage()._cdata, (None, False))[1] for t in tensors if t.device.type == "cpu")
        if name == "aten._local_scalar_dense.default":
            value = func(*args)
            if outside:
                self.host_values.append((args[0], value))
            elif depends:
                raise errors.CaptureError(f"a number is read at {where()} from a CPU tensor that the step computes "
                                          "from its inputs: it would stay as it is now. Move the tensor to the device")
            return value
        mutable = plans.mutable_arguments(func)
        if mutable:
            given = dict(zip([a.name for a in func._schema.arguments], args))
            given.update(kwargs)
            for target in pytree.tree_leaves([given.get(each) for each in mutable]):
                if isinstance(target, Tensor) and target.device.type == "cpu" \
                        and target.untyped_storage()._cdata not in self.host_made:
                    raise errors.CaptureError(
                        f"{func} at {where()} changes a CPU tensor of shape {tuple(target.shape)}: that would happen "
                        "only once, since the compiled step runs on the device. Move the tensor to the device")
        result = func(*args, **kwargs)
        random_ = torch.Tag.nondeterministic_seeded in func.tags
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if random_:
                    raise errors.CaptureError(
                        f"{func} at {where()} draws random numbers on the host: every step would use the same. Draw "
                        "them on the device (device='tpu')")
                if not any(storage._cdata == t.untyped_storage()._cdata for t in outside):
                    before = self.host_made.get(storage._cdata, (None, False))[1]
                    self.host_made[storage._cdata] = (storage, before or depends)
        return result

    def rollback(self) -> None:
        """After a failed capture: gradients and generators as before; what the step made raises when it is used."""
        for parameter, grad in self.leaves.values():
            parameter.grad = grad
        for generator, state in self.states.values():
            generator.set_state(state)
        for reference in self.made:
            storage = reference()
            if storage is not None and getattr(storage, "_tpu_traced", None) is not None:
                value = storage._tpu_traced.value
                del storage._tpu_traced
                empty = buffer.empty(value.shape, buffer.contiguous(value.shape), dtypes.to_torch(value.dtype))
                storage._tpu_buffer = buffer.of(empty)
                if storage.nbytes():
                    storage.resize_(0)


class Watch(TorchFunctionMode):
    """Sees what Python asks of tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if not recorder.paused and args and isinstance(args[0], Tensor) and args[0].device.type == "tpu":
            name = getattr(func, "__name__", "")
            if name in ("__get__", "__set__", "__delete__") and getattr(func, "__self__", None) is Tensor.grad:
                if args[0].is_leaf and args[0].requires_grad and traced(args[0]) is None:
                    recorder.track(args[0])
            elif name in _NEEDS_VALUE:
                raise recorder.needs_value({"__bool__": "an `if` on a tensor", "__float__": "float(tensor)",
                                            "__int__": "int(tensor)"}.get(name, name))
        return func(*args, **kwargs)


def _numpy(array: Any) -> np.ndarray:
    array.block_until_ready()
    return np.array(array)


def _plain_numbers(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name in ("dtype",)}


def _lift(recorder: Recorder, tensor: Tensor) -> Tensor:
    recorder.owner(tensor)
    return tensor


def _check_factorisation(recorder: Recorder, info: Tensor, name: str, *, is_matrix: bool) -> None:
    recorder.check_later(info, functools.partial(aten._linalg_check_errors.default, api_name=name,
                                                 is_matrix=is_matrix))


def _check_assertion(recorder: Recorder, condition: Tensor,
                     message: str = "Expected Tensor with single nonzero value, but got zero",
                     token: Tensor | None = None) -> Tensor | None:
    def check(value: Tensor) -> None:
        if not value.item():
            raise RuntimeError(message)

    recorder.check_later(condition, check)
    return token


_SPECIAL: dict[str, Any] = {
    "aten._linalg_check_errors.default": _check_factorisation,
    "aten._assert_async.default": _check_assertion,
    "aten._assert_async.msg": _check_assertion,
    "aten._functional_assert_async.msg": _check_assertion,
    "aten._to_copy.default": Recorder.to_copy,
    "aten.copy_.default": Recorder.copy_,
    "aten._local_scalar_dense.default": Recorder.item,
    "aten.lift_fresh.default": _lift,
    "aten.lift.default": _lift,
    "aten.native_batch_norm.default": Recorder.batch_norm,
    "aten._native_batch_norm_legit.default": Recorder.batch_norm,
    "aten.index_put_.default": Recorder.index_put,
    "aten._index_put_impl_.default": Recorder.index_put,
    "aten.index_put.default": functools.partial(Recorder.index_put, in_place=False),
    "aten._unsafe_view.default": lambda recorder, tensor, size: torch_door.redispatch_view(
        aten.view.default, tensor, size),
    "aten.is_pinned.default": lambda recorder, tensor, device=None: False,
    "aten.record_stream.default": lambda recorder, tensor, stream: None,
}
_DATA_DEPENDENT = {"aten.equal.default", "aten.nonzero.default", "aten.masked_select.default", "aten.bincount.default",
                   "aten.unique_dim.default", "aten._unique2.default", "aten.repeat_interleave.Tensor"}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor}
