"""Gradients of operators over JAX functions.

The default is jax.vjp of the function, in two operators of their own: the forward pass that also gives what the
backward pass needs, and the backward pass. A compiled training step has both in its graphs, and nothing is computed
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function

from ..eager import transforms
from ..runtime import dtypes
from . import program, signature
from .operator import Operator, avals_of
from .signature import Parameter, Signature

Tensor = torch.Tensor

_PULL = Signature((Parameter("grads", "tensors", "Tensor?[]"), Parameter("kept", "tensors", "Tensor[]"),
                   Parameter("which", signature.STATIC, "str")), "list", -1)


class ByJax:
    """The gradient that jax.vjp gives. Where it is to be differentiated again, a third operator computes it from the
    arguments, with a gradient of this kind of its own."""

    def __init__(self, op: Operator) -> None:
        self.op = op
        self._gradients: dict[Any, tuple[str, program.Gradient]] = {}
        self._by_name: dict[str, program.Gradient] = {}
        self._parameters = tuple(signature.plain(p) for p in op.signature.parameters)
        self.forward = self._operator("__vjp_forward", self._forward, Signature(self._parameters, "list", -1))
        self.backward = self._operator("__vjp", self._backward, _PULL)
        self._again: Operator | None = None

    def _operator(self, suffix: str, fn: Callable[..., Any], of: Signature) -> Operator:
        made = Operator(self.op.name + suffix, fn, of, self.op.library, self.op.x64)
        torch.library.register_vmap(made.overload, made.over_batch, lib=self.op.library)
        return made

    def of(self, layout: signature.Layout, avals: Sequence[program.Aval]) -> tuple[str, program.Gradient]:
        """The gradient for such arguments, and the name by which the backward operator knows it."""
        key = (layout, tuple(avals), program.wide(self.op.x64))
        found = self._gradients.get(key)
        if found is None:
            made = program.gradient(self.op.flat(layout), avals, key[-1], self.op.name)
            name = ", ".join([*(f"{kind.name}{list(shape)}" for shape, kind in avals),
                              *(repr(each[1]) for each in layout if isinstance(each, tuple) and len(each) == 2)])
            if name in self._by_name:
                name = f"{name}, {len(self._by_name)}"
            found = self._gradients[key] = name, made
            self._by_name[name] = made
        return found

    def _forward(self, *arguments: Any) -> list[Any]:
        arrays, layout = self.op.signature.split(arguments)
        _, made = self.of(layout, [(tuple(a.shape), np.dtype(a.dtype)) for a in arrays])
        return made.forward(arrays)

    def _backward(self, grads: list[Any], kept: list[Any], which: str) -> list[Any]:
        made = self._by_name[which]
        shapes = made.forward.results[:made.outputs]
        with_zeros = [_zeros(shape) if grad is None else grad for grad, shape in zip(grads, shapes)]
        return made.backward([*with_zeros, *kept])

    def again(self) -> Operator:
        """Arguments and gradients of the results -> gradients of the arguments."""
        if self._again is None:
            of = Signature((*self._parameters, Parameter("grads", "tensors", "Tensor?[]")), "list", -1)
            self._again = made = self._operator("__grad", self._recompute, of)
            rules: list[ByJax] = []

            def rule() -> ByJax:
                if not rules:
                    rules.append(ByJax(made))
                return rules[0]

            self.op.library.impl(made.name.split("::")[1], kernel(made, rule), "Autograd")
        return self._again

    def _recompute(self, *arguments: Any) -> list[Any]:
        *given, grads = arguments
        arrays, layout = self.op.signature.split(given)
        return program.pull(self.op.flat(layout), arrays, grads)

    def apply(self, arguments: Sequence[Any]) -> Any:
        """The operator with its gradient recorded."""
        tensors, layout = self.op.signature.split(arguments)
        _, made = self.of(layout, avals_of(tensors))
        return self.op.structure(_apply(_Jax, _Call(self, layout), *tensors)[:made.outputs])


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Function.apply at autograd's place in the dispatcher, where torch.func's transforms have done their part already.
    (apply itself would start them again.) Uses torch._functorch (private; tried on torch 2.13.0)."""
    if not transforms.active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


class _Call:
    """Everything of a call that is no tensor."""

    def __init__(self, by: Any, layout: signature.Layout) -> None:
        self.by, self.layout = by, layout

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        return self.by.op.signature.join(tensors, _as_given(self.layout))


def _zeros(shape: Any) -> Any:
    import jax.numpy as jnp

    kind = shape.dtype if jnp.issubdtype(shape.dtype, jnp.inexact) else np.dtype(np.float32)
    return jnp.zeros(shape.shape, kind)


class _Jax(torch.autograd.Function):
    """Its results are the operator's, and then what the backward pass needs besides."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(call.by.forward.overload(*call.arguments(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *tensors = inputs
        ctx.call, ctx.tensors = call, len(tensors)
        ctx.which, made = call.by.of(call.layout, avals_of(tensors))
        ctx.outputs, ctx.differentiable = made.outputs, made.differentiable
        residuals = output[made.outputs:]
        places = {"input": tensors, "output": output[:made.outputs], "residual": residuals}
        ctx.save_for_backward(*tensors, *(places[each.where][each.index] for each in made.kept))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*residuals, *(out for out in output[:made.outputs]
                                                  if not (out.is_floating_point() or out.is_complex())))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found: list[Any] = [None] * (1 + ctx.tensors)
        upstream = list(grads[:ctx.outputs])
        if all(grad is None for grad in upstream):
            return tuple(found)
        saved = ctx.saved_tensors
        by = ctx.call.by
        if torch.is_grad_enabled():  # create_graph=True
            pulled = by.again().overload(*ctx.call.arguments(saved[:ctx.tensors]), upstream)
        else:
            pulled = by.backward.overload(upstream, list(saved[ctx.tensors:]), ctx.which)
        for at, grad in zip(ctx.differentiable, pulled, strict=True):
            found[1 + at] = grad if ctx.needs_input_grad[1 + at] else None
        return tuple(found)


def _as_given(layout: signature.Layout) -> signature.Layout:
    """Statics as torch operators take them."""
    return tuple((each[0], dtypes.to_torch(each[1])) if isinstance(each, tuple) and len(each) == 2
                 and isinstance(each[1], np.dtype) else each for each in layout)


class ByUser:
    """A gradient written with torch tensors, as torch.library.register_autograd takes it."""

    def __init__(self, op: Operator, backward: Callable[..., Any], setup_context: Callable[..., Any] | None) -> None:
        self.op, self.backward, self.setup_context = op, backward, setup_context

    def apply(self, arguments: Sequence[Any]) -> Any:
        result = _apply(_User, self, tuple(not isinstance(a, list | tuple) for a in arguments), *arguments)
        return list(result) if self.op.signature.returns == "list" else result


class _User(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by: ByUser, _: Any, *arguments: Any) -> Any:
        ctx.by = by
        with torch._C._AutoDispatchBelowAutograd():
            result = by.op.overload(*arguments)
        if by.setup_context is not None:
            by.setup_context(ctx=ctx, inputs=arguments, output=result)
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        result = ctx.by.backward(ctx, *grads)
        return None, None, *(result if isinstance(result, tuple) else (result,))


class Refused:
    """No gradient: its use is an error in the backward pass."""

    def __init__(self, op: Operator, why: str) -> None:
        self.op, self.why = op, why

    def apply(self, arguments: Sequence[Any]) -> Any:
        tensors, layout = self.op.signature.split(arguments)
        return self.op.structure(_apply(_Refused, _Call(self, layout), *tensors))


class _Refused(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            result = call.by.op.overload(*call.arguments(tensors))
        return tuple(result) if isinstance(result, list | tuple) else (result,)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.by = inputs[0].by
        ctx.mark_non_differentiable(*(out for out in output if not (out.is_floating_point() or out.is_complex())))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{ctx.by.op.name} has no gradient: {ctx.by.why}")


def kernel(op: Operator, rule: Callable[[], Any]) -> Callable[..., Any]:
    """What stands at autograd's place in the dispatcher."""

    def autograd(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            arguments = op.signature.arguments(args, kwargs)
            tensors, _ = op.signature.split(arguments)
            if any(tensor.requires_grad for tensor in tensors):
                return rule().apply(arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op.overload(*args, **kwargs)

    return autograd
