"""all_reduce, reduce and reduce_scatter of tpu tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..lowering import collective
from . import host_memory, options
from .launching import LaunchingGroup, Tensor, dist, padded

_OPS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "BAND": "band", "BOR": "bor",
        "BXOR": "bxor"}
_PLAIN = {mine: getattr(dist.ReduceOp, name) for name, mine in _OPS.items()}


def reducer_of(op: Any) -> tuple[str, Any]:
    """The reduction's name, and the factor that every tensor is multiplied with before (None for most)."""
    if op == dist.ReduceOp.PREMUL_SUM:
        return "sum", op.__getstate__()[1]
    for name, mine in _OPS.items():
        if op == getattr(dist.ReduceOp, name):
            return mine, None
    raise NotImplementedError(f"tpu: reduce op {op} is not supported; use one of {', '.join(_OPS)}, PREMUL_SUM")


def check_reducible(tensor: Tensor, reducer: str, factor: Any = None) -> None:
    if reducer in ("band", "bor", "bxor") and (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"tpu: {reducer} needs an integer or bool tensor, got {tensor.dtype}")
    if reducer in ("min", "max") and tensor.is_complex():
        raise TypeError(f"tpu: {reducer} is not defined for {tensor.dtype}")
    if reducer == "avg" and tensor.dtype == torch.bool:
        raise TypeError("tpu: the average of bool tensors is not defined; use SUM, MAX (or) or PRODUCT, MIN (and)")
    if factor is not None and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"tpu: PREMUL_SUM needs a floating point tensor, got {tensor.dtype}")


def _scaled(tensors: Sequence[Tensor], factor: Any) -> list[Tensor]:
    if factor is None:
        return list(tensors)
    if isinstance(factor, Tensor):
        factor = factor.item()
    return [tensor.detach() * factor for tensor in tensors]


class Reductions(LaunchingGroup):
    """The reductions of a process group."""

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        opts = opts if opts is not None else options.all_reduce()
        if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            opts = options.all_reduce(opts)
        if self.on_host(*tensors):
            return self.host.allreduce(tensors, opts)
        return self._all_reduce("all_reduce", tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.all_reduce_coalesced()
        if self.on_host(*tensors):
            return self.host.allreduce_coalesced(tensors, opts)
        return self._all_reduce("all_reduce", list(tensors), list(tensors), opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.reduce()
        if self.on_host(*tensors):
            return self.host.reduce(tensors, opts)
        outputs = list(tensors) if self._rank == opts.rootRank else []
        return self._all_reduce("reduce", list(tensors), outputs, opts, opts.rootRank)

    def _all_reduce(self, name: str, tensors: list[Tensor], outputs: list[Tensor], opts: Any,
                    root: int | None = None) -> Any:
        reducer, factor = reducer_of(opts.reduceOp)
        for tensor in tensors:
            check_reducible(tensor, reducer, factor)
        inputs = _scaled(tensors, factor)
        to = "" if root is None else f" to {self.ranks[root]}"
        call = self.call(f"{name} {reducer}{to}", tensors, opts)
        if host_memory.carries(inputs) and host_memory.reduces(inputs, reducer):
            return self.carry(call, host_memory.reduce(reducer, root), inputs, outputs, tensors)

        def body(*values: Any) -> list[Any]:
            *xs, groups = values
            return [collective.all_reduce(x, reducer, groups) for x in xs]

        return self.execute(call, name, body, (reducer,), inputs, outputs, tensors)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.reduce_scatter()
        if self.on_host(output, input):
            return self.host._reduce_scatter_base(output, input, opts)
        return self._scatter_sums([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.reduce_scatter()
        if self.on_host(*outputs, *inputs):
            return self.host.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self._scatter_sums(list(outputs), list(inputs), opts)

    def _scatter_sums(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        reducer, factor = reducer_of(opts.reduceOp)
        size = self._size
        for output, tensor in zip(outputs, inputs):
            check_reducible(tensor, reducer, factor)
            self.same_total("reduce_scatter", tensor, output)
        call = self.call(f"reduce_scatter {reducer}", inputs, opts)
        shapes = tuple(tuple(output.shape) for output in outputs)
        given = _scaled(inputs, factor)
        if host_memory.carries(given) and host_memory.reduces(given, reducer):
            return self.carry(call, host_memory.reduce_scatter(reducer, shapes), given, outputs, outputs)

        def body(*values: Any) -> list[Any]:
            *xs, groups = values
            return [collective.reduce_scatter(x.reshape(size, x.size // size), reducer, groups).reshape(shape)
                    for x, shape in zip(xs, shapes)]

        return self.execute(call, "reduce_scatter", body, (reducer, shapes), given, outputs, outputs)

    def same_total(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            raise ValueError(
                f"{name}: a tensor of {whole.numel()} {whole.dtype} elements does not fit {self._size} ranks with "
                f"{part.numel()} {part.dtype} elements each")

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.reduce_scatter()
        output, parts = outputs[0], list(inputs[0])
        if self.on_host(output, *parts):
            return self.host.reduce_scatter(outputs, inputs, opts)
        reducer, factor = reducer_of(opts.reduceOp)
        check_reducible(output, reducer, factor)
        rows, longest = padded(_scaled(parts, factor))
        got = torch.empty(longest, dtype=output.dtype, device="tpu")
        work = self._scatter_sums([got], [rows], options.reduce_scatter(_PLAIN[reducer], opts.timeout))
        work.wait()
        output.detach().copy_(got[:math.prod(output.shape)].view(output.shape))
        return self.done([output])

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
