"""Every form of one operator in one dtype: forward, gradient, non-contiguous inputs, in-place, `out=`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..eager import execute, fallback, kernels
from ..lowering import table
from . import compare, database

FORMS = ("forward", "gradient", "noncontiguous", "inplace", "out")


@dataclass
class Outcome:
    """What one operator did in one dtype; `total` and `passed` count samples a form."""

    dtype: str
    total: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "total": dict(self.total), "passed": dict(self.passed),
                "failures": self.failures, "fallbacks": self.fallbacks}


class Skip(Exception):
    """The CPU itself refuses this, or the result is of a dtype that is not ours to test."""


def lowered(op: Any) -> bool:
    """Whether the table holds the operator itself (as against the operators PyTorch takes it apart into)."""
    names = {op.aten_name, op.aten_name.removeprefix("linalg_"), op.aten_name.removeprefix("special_")}
    return any(entry.split(".")[1] in names for entry in (*table.TABLE, *kernels.KERNELS))


def _spread(items: list[Any], count: int) -> Iterator[tuple[int, Any]]:
    """At most `count` items, evenly over the list."""
    step = max(1, -(-len(items) // max(count, 1)))
    return ((i, items[i]) for i in range(0, len(items), step))


class Check:
    """One operator in one dtype."""

    def __init__(self, op: Any, dtype: torch.dtype, samples: int) -> None:
        self.op = op
        self.dtype = dtype
        self.kind = str(dtype).removeprefix("torch.")
        self.samples = samples
        self.random = database.RANDOM.match(op.name) is not None
        self.ties = database.TIES.match(op.name) is not None
        self.unique = database.GAUGE.match(op.name) is not None
        self.differentiable = bool(op.supports_autograd and self.kind in database.GRADIENT_DTYPES
                                   and dtype in op.supported_backward_dtypes("cpu"))
        self.outcome = Outcome(self.kind)

    def run(self) -> Outcome:
        fallback.reset()
        torch.manual_seed(0)
        samples = list(self.op.sample_inputs("cpu", self.dtype, requires_grad=self.differentiable))
        for index, sample in _spread(samples, self.samples):
            self._forward_and_gradient(index, sample)
        few = max(1, self.samples // 3)
        for index, sample in _spread(samples, few):
            self._noncontiguous(index, sample)
        torch.manual_seed(0)
        plain = list(self.op.sample_inputs("cpu", self.dtype, requires_grad=False))
        for index, sample in _spread(plain, few):
            if self.op.inplace_variant is not None and not sample.broadcasts_input:
                self._inplace(index, sample)
            if self.op.supports_out and not self.random:
                self._out(index, sample)
        execute.clear()
        self.outcome.fallbacks = fallback.report()
        return self.outcome

    # ------------------------------------------------------------------------------------------------- the forms

    def _forward_and_gradient(self, index: int, sample: Any) -> None:
        reference = gradients = None
        with self._recorded("forward", index, sample):
            want, reference = self._reference(lambda s: self._call(s, lambda x: x, self.differentiable), sample)
            got, gradients = self._call(sample, self._place, self.differentiable)
            self._equal(want, got, sample, lambda: self._call(sample, compare.widened, False)[0])
        if reference is None:
            return
        with self._recorded("gradient", index, sample):
            try:
                wanted = reference()
            except Exception as error:
                raise Skip from error
            if gradients is None:
                raise AssertionError("no result of the device that could be differentiated")
            try:
                gotten = gradients()
                compare.equal(wanted, gotten, "gradient", 10.0, self.kind,
                              not self._is_random(sample) and not (self.ties and self.kind == "bfloat16"))
            except AssertionError:
                if not compare.as_near(wanted, gotten, self._call(sample, compare.widened, True)[1]()):
                    raise

    def _noncontiguous(self, index: int, sample: Any) -> None:
        with self._recorded("noncontiguous", index, sample):
            try:
                spread = sample.noncontiguous()
            except Exception as error:
                raise Skip from error
            want, _ = self._reference(lambda s: self._call(s, lambda x: x, False), spread)
            got, _ = self._call(spread, self._place, False)
            self._equal(want, got, spread, lambda: self._call(spread, compare.widened, False)[0])

    def _inplace(self, index: int, sample: Any) -> None:
        def call(place: Callable[[Any], Any]) -> Any:
            target = place(sample.input).clone()
            args, kwargs = self._arguments(sample, place)
            torch.manual_seed(1)
            result = self.op.inplace_variant(target, *args, **kwargs)
            return result, target

        with self._recorded("inplace", index, sample):
            want = self._reference(lambda _: call(lambda x: x), sample)
            got = call(self._place)
            if got[0] is not got[1] and want[0] is want[1]:
                raise AssertionError("the in-place form did not give its own tensor")
            self._equal(want, got, sample, lambda: call(compare.widened))

    def _out(self, index: int, sample: Any) -> None:
        def call(place: Callable[[Any], Any], like: Any) -> Any:
            outs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=d) for t, d in like]
            for t in outs:
                t.fill_(1)
            args, kwargs = self._arguments(sample, place)
            torch.manual_seed(1)
            self.op.op(place(sample.input), *args, **kwargs, out=outs[0] if len(outs) == 1 else tuple(outs))
            return outs

        def host(_: Any) -> Any:
            args, kwargs = self._arguments(sample, lambda x: x)
            results = compare.tensors(self.op.op(sample.input, *args, **kwargs))
            return results, call(lambda x: x, [(t, "cpu") for t in results])

        with self._recorded("out", index, sample):
            shapes, want = self._reference(host, sample)
            got = call(self._place, [(t, "tpu") for t in shapes])
            if self.unique:  # defined up to a sign, and not in the form that OpInfo can reduce
                compare.equal(want, got, "result", 1.0, self.kind, values=False)
            else:
                self._equal(want, got, sample, lambda: compare.tensors(self._call(sample, compare.widened, False)[0]))

    # -------------------------------------------------------------------------------------------------- the parts

    def _place(self, value: Any) -> Any:
        return compare.to_device(value)

    def _arguments(self, sample: Any, place: Callable[[Any], Any]) -> tuple[Any, Any]:
        if database.HOST_ARGUMENTS.match(self.op.name):
            return sample.args, sample.kwargs
        return place(sample.args), place(sample.kwargs)

    def _call(self, sample: Any, place: Callable[[Any], Any], differentiable: bool) -> tuple[Any, Any]:
        """Results, and how to get gradients, of a sample whose tensors are mapped by `place`."""
        input_ = place(sample.input)
        args, kwargs = self._arguments(sample, place)
        torch.manual_seed(1)
        result = self.op.op(input_, *args, **kwargs)
        inputs = [t for t in compare.tensors((input_, args, kwargs)) if t.requires_grad]
        if not differentiable or not inputs:
            return result, None

        def gradients() -> Any:
            outputs = [t for t in compare.tensors(sample.output_process_fn_grad(result)) if t.requires_grad]
            if not outputs:
                return []
            generator = torch.Generator().manual_seed(7)
            weights = [torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.dtype).to(t.device)
                       for t in outputs]
            return torch.autograd.grad(outputs, inputs, weights, allow_unused=True)

        return result, gradients

    def _reference(self, fn: Callable[[Any], Any], sample: Any) -> Any:
        """What the CPU gives; a sample that it refuses is left out."""
        try:
            result = fn(sample)
        except Exception as error:
            raise Skip from error
        if any(t.dtype == torch.complex32 or t.is_quantized for t in compare.tensors(result)):
            raise Skip
        return result

    def _is_random(self, sample: Any) -> bool:
        return self.random or bool(sample.kwargs.get("dropout_p")) or (
            self.op.name == "nn.functional.multi_head_attention_forward" and sample.args[9] > 0)

    def _equal(self, want: Any, got: Any, sample: Any, exact: Callable[[], Any]) -> None:
        unique = sample.output_process_fn_grad if self.unique else lambda x: x
        try:
            compare.equal(unique(want), unique(got), "result", 1.0, self.kind, not self._is_random(sample),
                          self.ties and not sample.kwargs.get("stable", False))
        except AssertionError:
            if not compare.as_near(unique(want), unique(got), unique(exact())):
                raise

    @contextlib.contextmanager
    def _recorded(self, form: str, index: int, sample: Any) -> Iterator[None]:
        try:
            yield
        except Skip:
            return
        except Exception as error:
            shapes = [tuple(t.shape) for t in compare.tensors((sample.input, sample.args, sample.kwargs))]
            extra = " ".join(text for text in (str(sample.args), str(sample.kwargs)) if 2 < len(text) < 80)
            self.outcome.failures.append(f"{form}, sample {index}, {shapes} {extra}: {type(error).__name__}: "
                                         f"{' '.join(str(error).split())[:260]}")
        else:
            self.outcome.passed[form] += 1
        self.outcome.total[form] += 1
