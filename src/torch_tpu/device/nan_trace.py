"""torch.tpu.debug.nan_trace: which module, which operator, and which inputs made the first NaN or Inf."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor

# Operators that only place values which somebody chose: a mask's -inf is no overflow.
_PLACING = frozenset({"full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where",
                      "scalar_tensor", "copy_", "_to_copy", "clone", "empty", "empty_like", "empty_strided",
                      "new_empty", "new_empty_strided", "lift_fresh", "index_put_", "index_put"})
_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


class NonFiniteError(RuntimeError):
    """An operator gave NaN (or Inf) for finite inputs. `finding` has the parts of the message."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass(frozen=True)
class Finding:
    """Where a value that is not finite came from.

    Attributes:
        kind: "NaN" or "Inf".
        operator: the ATen overload.
        direction: "forward" or "backward".
        module: qualified name of the module ("" for the model itself, None outside of any), and its class.
        line: file:line of the caller; in backward, of the forward call that is being differentiated.
        inputs, outputs: a line for each tensor: dtype, shape, range, how many NaN and Inf.
        cause: an earlier operator that made an Inf of finite inputs.
    """

    kind: str
    operator: str
    direction: str
    module: str | None
    module_class: str
    line: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    differentiated: str = ""
    cause: Finding | None = field(default=None, repr=False)

    def where(self) -> str:
        if self.module is None:
            place = "outside of the traced modules"
        else:
            place = f"in module {self.module!r} ({self.module_class})" if self.module else f"in {self.module_class}"
        of = f" of {self.differentiated}" if self.differentiated else ""
        return f"{self.operator}, {self.direction}{of}, {place}, called at {self.line}"

    def __str__(self) -> str:
        lines = [f"the first {self.kind}: {self.where()}"]
        lines += [f"  input  {text}" for text in self.inputs] + [f"  output {text}" for text in self.outputs]
        if self.cause is not None:
            lines.append(f"  the Inf before it: {self.cause.where()}")
            lines += [f"    input  {text}" for text in self.cause.inputs]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Place:
    operator: str
    module: str | None
    module_class: str
    line: str


class NanTrace(TorchDispatchMode):
    """See `nan_trace`. `first_inf` is the first Inf that came of finite inputs, or None."""

    def __init__(self, model: torch.nn.Module | None, inf: bool) -> None:
        super().__init__()
        self.first_inf: Finding | None = None
        self._inf = inf
        self._names = {} if model is None else {id(m): name for name, m in model.named_modules()}
        self._known = {} if model is None else {
            _memory(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._model = model
        self._stack: list[torch.nn.Module] = []
        self._forward: dict[int, _Place] = {}  # by the sequence number of the autograd node
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> NanTrace:
        for module in [] if self._model is None else self._model.modules():
            for handle in (module.register_forward_pre_hook(self._push),
                           module.register_forward_hook(self._pop, always_call=True)):
                self._exit.callback(handle.remove)
        if "torch._dynamo" in sys.modules:  # compiled functions run operator by operator meanwhile
            self._exit.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)
        finally:
            self._exit.close()
            self._stack.clear()

    def _push(self, module: torch.nn.Module, _: Any) -> None:
        self._stack.append(module)

    def _pop(self, module: torch.nn.Module, *_: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        before = (args, kwargs)
        if func._schema.is_mutable:  # what it overwrites is kept for the report
            names = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            labels = [a.name for a in func._schema.arguments]
            before = (tuple(_copied(value) if name in names else value for name, value in zip(labels, args)),
                      {name: _copied(value) if name in names else value for name, value in kwargs.items()})
        place = self._place(func)
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if _fractional(leaf)]
        if func._schema.is_mutable and not outputs:
            outputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _fractional(leaf)]
        if any(not torch.isfinite(output).all().item() for output in outputs):
            self._judge(func, place, before, outputs)
        return result

    def _place(self, func: Any) -> _Place:
        module = self._stack[-1] if self._stack else None
        place = _Place(str(func), self._names.get(id(module)), type(module).__name__, _line())
        if torch._C._current_autograd_node() is None and torch.is_grad_enabled():
            # The node of this operator has been numbered just before its kernel is called.
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, place)
        return place

    def _judge(self, func: Any, place: _Place, before: Any, outputs: list[Tensor]) -> None:
        inputs = [leaf for leaf in pytree.tree_leaves(before) if _fractional(leaf)]
        nan = any(torch.isnan(output).any().item() for output in outputs)
        if nan and any(torch.isnan(value).any().item() for value in inputs):
            given = next((name for value in inputs if (name := self._known.get(_memory(value))) is not None
                          and torch.isnan(value).any().item()), None)
            what = f"parameter or buffer {given!r}" if given else "an input from outside of the trace"
            raise NonFiniteError(self._finding(func, place, before, outputs, f"NaN (already in {what})"))
        if nan:
            raise NonFiniteError(self._finding(func, place, before, outputs, "NaN"))
        if any(not torch.isfinite(value).all().item() for value in inputs) \
                or str(func).split(".")[1] in _PLACING or self._infinite_number(before):
            return
        found = self._finding(func, place, before, outputs, "Inf")
        if self.first_inf is None:
            self.first_inf = found
        if self._inf:
            raise NonFiniteError(found)

    @staticmethod
    def _infinite_number(values: Any) -> bool:
        return any(isinstance(leaf, float) and leaf in (float("inf"), float("-inf"))
                   for leaf in pytree.tree_leaves(values))

    def _finding(self, func: Any, place: _Place, before: Any, outputs: list[Tensor], kind: str) -> Finding:
        node = torch._C._current_autograd_node()
        differentiated, direction = "", "forward"
        if node is not None:
            direction = "backward"
            made = self._forward.get(node._sequence_nr())
            if made is not None:
                differentiated, place = made.operator, made
        args, kwargs = before
        labels = [argument.name for argument in func._schema.arguments]
        named = [*zip(labels, args), *kwargs.items()]
        inputs = tuple(f"{name}: {_statistics(leaf)}" for name, value in named
                       for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor | float | int))
        return Finding(kind, str(func), direction, place.module, place.module_class, place.line, inputs,
                       tuple(_statistics(output) for output in outputs), differentiated,
                       self.first_inf if kind == "NaN" else None)


def nan_trace(model: torch.nn.Module | None = None, *, inf: bool = False) -> NanTrace:
    """A context in which the operator that makes the first NaN raises, and says where it is and what it was given.

        with torch.tpu.debug.nan_trace(model):
            loss = model(**batch).loss
            loss.backward()

    Forward and backward; the error names the module by its qualified name, the operator, the line that called it, and
    the dtype, shape and range of each input. An Inf that finite inputs overflowed to is named too, when the NaN came of
    it. Each operator is waited for, so this is for finding a fault, not for training. Models given to torch.compile run
    operator by operator inside (a step of torch.tpu.compile_step does not: call the undecorated function). Works on
    tensors of every device.

    Args:
        model: its modules are named. Without it, operators and lines are.
        inf: raise at the first Inf as well. Values that a mask or a constant puts in (masked_fill with -inf) are no
            fault; an Inf computed of finite inputs is.

    Raises:
        torch_tpu.device.nan_trace.NonFiniteError: inside, a RuntimeError; `error.finding` has the parts.
    """
    return NanTrace(model, inf)


def _fractional(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel() > 0


def _memory(tensor: Tensor) -> int:
    """The same for a parameter and views of it."""
    return tensor.untyped_storage().data_ptr()


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value)


def _line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def _statistics(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    head = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if not value.numel():
        return head
    if not _fractional(value):
        low, high = (v.item() for v in value.detach().cpu().to(torch.int64).aminmax())
        return f"{head}, {low} to {high}"
    here = value.detach().cpu()
    here = here.abs() if here.is_complex() else here
    here = here.double().reshape(-1)
    finite = here[here.isfinite()]
    parts = [f"{finite.min().item():.4g} to {finite.max().item():.4g}, mean {finite.mean().item():.4g}"
             if finite.numel() else "no finite value"]
    for count, label in ((int(here.isnan().sum()), "NaN"), (int(here.isinf().sum()), "Inf")):
        if count:
            parts.append(f"{count} of {here.numel()} {label}")
    return f"{head}, " + ", ".join(parts)
