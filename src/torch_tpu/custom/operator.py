"""Defines a torch operator over a JAX function: schema, results' shapes, kernels, batching. Autograd is in autograd.py.

The operator's lowering goes into the one table, so eager calls, compiled graphs, captured steps and programs compiled
ahead find it there as they find PyTorch's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..eager import dispatcher
from ..lowering import table
from ..runtime import dtypes
from . import program, signature
from .signature import Layout, Signature

Tensor = torch.Tensor
Aval = program.Aval


class Operator:
    """One operator. `fn` takes its arguments in the order of the signature's parameters, tensors as JAX values.

    Attributes:
        mutated: parameters whose new value is among the function's results, and at which place.
        overload: torch's operator.
    """

    def __init__(self, name: str, fn: Callable[..., Any], of: Signature, library: torch.library.Library,
                 x64: bool = False, mutated: dict[str, int] | None = None) -> None:
        self.name, self.fn, self.signature, self.x64 = name, fn, of, x64
        self.mutated = mutated or {}
        self.library = library
        self.fake: Callable[..., Any] | None = None
        self._programs: dict[Any, program.Traced] = {}
        self.kernel: Any = None  # on the device; the table's plan, unless something else is put here
        self._batched: Operator | None = None
        self._lock = threading.RLock()
        namespace, short = name.split("::")
        self.table_name = f"{namespace}.{short}.default"
        table.TABLE.pop(self.table_name, None)
        table.lowering(self.table_name, users=True)(self.lower)
        library.define(short + signature.schema(of), tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, namespace), short).default
        library.impl(short, self.meta, "Meta")
        library.impl(short, self.on_device, "PrivateUse1")
        library.impl(short, self.on_host, "CPU")

    # -- the function over flat arrays

    def flat(self, layout: Layout) -> Callable[..., list[Any]]:
        """The function from flat arrays to flat results, with everything else fixed."""

        def call(*arrays: Any) -> list[Any]:
            return self._flat_results(self.signature.call(self.fn, self.signature.join(arrays, layout)))

        call.__name__ = self.name
        return call

    def _flat_results(self, result: Any) -> list[Any]:
        kind = self.signature.returns
        if kind == "none":
            results = [] if result is None else [result]
        elif kind == "one":
            results = [result]
        else:
            results = list(result) if isinstance(result, list | tuple) else [result]
        if self.signature.results >= 0 and len(results) != self.signature.results:
            raise TypeError(f"{self.name} is annotated to return {self.signature.results} arrays, and returned "
                            f"{len(results)}")
        for value in results:
            if not hasattr(value, "shape") or not hasattr(value, "dtype"):
                raise TypeError(f"{self.name} is to return arrays, and returned a {type(value).__name__}")
        places = list(self.mutated.values())
        return [r for at, r in enumerate(results) if at not in places] + [results[at] for at in places]

    def program(self, layout: Layout, avals: Sequence[Aval]) -> program.Traced:
        """The function traced for such arguments."""
        key = (layout, tuple(avals), program.wide(self.x64))
        found = self._programs.get(key)
        if found is None:
            with self._lock:
                found = self._programs[key] = program.trace(self.flat(layout), avals, key[-1], self.name)
        return found

    def structure(self, flat: Sequence[Any]) -> Any:
        """Flat results as the schema has them: a value, a tuple, a list, or nothing."""
        if self.signature.returns == "list":
            return list(flat)
        return flat[0] if len(flat) == 1 else tuple(flat)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The table's JAX function."""
        arrays, layout = self.signature.split(self.signature.arguments(args, kwargs))
        traced = self.program(layout, [(tuple(a.shape), np.dtype(a.dtype)) for a in arrays])
        return self.structure(traced(arrays))

    # -- torch's side

    def meta(self, *args: Any, **kwargs: Any) -> Any:
        """Results without data. Sizes that Dynamo made symbolic are fixed: JAX's programs have fixed shapes."""
        if self.fake is not None:
            return self.fake(*args, **kwargs)
        tensors, layout = self.signature.split(self.signature.arguments(args, kwargs))
        return self.structure(empty_results(self.program(layout, avals_of(tensors)).results, "meta"))

    def on_device(self, *args: Any, **kwargs: Any) -> Any:
        if self.kernel is None:
            self.kernel = dispatcher.kernel(self.overload)
        return self.kernel(*args, **kwargs)

    def on_host(self, *args: Any, **kwargs: Any) -> Any:
        """CPU tensors: JAX computes on the CPU."""
        from . import host

        tensors, layout = self.signature.split(self.signature.arguments(args, kwargs))
        return self.structure(host.run(self.program(layout, avals_of(tensors)), tensors, self.name))

    # -- torch.vmap

    def batched(self) -> Operator:
        """The operator over one more dimension of some arguments: the same arguments, and for each of them (a list
        counts as its items) which dimension that is, or -1. Batched again, it takes one such list a level."""
        with self._lock:
            if self._batched is None:
                more = signature.Parameter("dims", signature.STATIC, "int[]")
                own = Signature((*(signature.plain(p) for p in self.signature.parameters), more),
                                "list", -1)
                self._batched = Operator(f"{self.name}__vmap", self._over_batches, own, self.library, self.x64)
                self._batched._batched = self._batched
                torch.library.register_vmap(self._batched.overload, self._batched.over_one_more, lib=self.library)
        return self._batched

    def _over_batches(self, *arguments: Any) -> list[Any]:
        import jax

        *arguments_, dims = arguments
        arrays, layout = self.signature.split(arguments_)
        mapped: Callable[..., list[Any]] = self.flat(layout)
        for level in range(len(dims) // max(1, len(arrays))):
            axes = dims[level * len(arrays):(level + 1) * len(arrays)]
            mapped = jax.vmap(mapped, in_axes=tuple(None if d < 0 else d for d in axes))
        return mapped(*arrays)

    def over_batch(self, info: Any, in_dims: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """torch.vmap's rule."""
        arguments = self.signature.arguments(args, kwargs)
        dims = [*in_dims, *(None for _ in arguments[len(in_dims):])]
        results = self.batched().overload(*arguments, self._dims(arguments, dims))
        return self.structure(results), self.structure([0] * len(results))

    def over_one_more(self, info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        """The rule of the batched operator itself."""
        *arguments, dims = args
        results = self.overload(*arguments, [*dims, *self._dims(arguments, in_dims)])
        return results, [0] * len(results)

    def _dims(self, arguments: Sequence[Any], in_dims: Sequence[Any]) -> list[int]:
        found: list[int] = []
        for parameter, value, dim in zip(self.signature.parameters, arguments, in_dims):
            if parameter.kind == "tensors":
                each = dim if isinstance(dim, list | tuple) else [dim] * len(value)
                found += [-1 if d is None else d for v, d in zip(value, each) if v is not None]
            elif parameter.kind != signature.STATIC and value is not None:
                found.append(-1 if dim is None else dim)
        return found


def avals_of(tensors: Sequence[Tensor]) -> list[Aval]:
    """Shapes and dtypes; a symbolic size becomes the number that it is now."""
    return [(tuple(int(size) for size in tensor.shape), dtypes.to_numpy(tensor.dtype)) for tensor in tensors]


def empty_results(results: Sequence[Any], device: str) -> list[Tensor]:
    """Tensors for results of a program."""
    return [torch.empty(result.shape, dtype=dtypes.to_torch(result.dtype), device=device) for result in results]
