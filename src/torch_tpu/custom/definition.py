"""torch.tpu.pallas.jax_op: a JAX or Pallas function as a torch operator."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import autograd, donation, sharding, signature
from .operator import Operator

_libraries: dict[str, torch.library.Library] = {}
_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")


class JaxOp:
    """A torch operator over a JAX function. Called like the function, with tensors in place of arrays.

    Attributes:
        name: "namespace::name".
        overload: the operator, torch.ops.namespace.name.default.
    """

    def __init__(self, name: str, fn: Callable[..., Any], *, gradient: bool, donated: tuple[str, ...],
                 mutated: dict[str, int], x64: bool, of: signature.Signature) -> None:
        functools.update_wrapper(self, fn)
        self.name = name
        self._qualname = getattr(fn, "__qualname__", name)
        namespace, short = name.split("::")
        old = _libraries.pop(name, None)
        if old is not None:  # defined again, as in a notebook
            old._destroy()
        self._library = _libraries[name] = torch.library.Library(namespace, "FRAGMENT")
        self._signature = of
        self._functional = Operator(f"{name}_functional" if mutated else name, fn, of, self._library, x64, mutated)
        self.overload = self._functional.overload
        if mutated:
            self.overload = donation.in_place(self._functional, short, self._library)
        if donated:
            self._functional.kernel = donation.consuming(self._functional, donated)
        self._rule: Any = None
        if not gradient or mutated:
            why = ("it writes its arguments" if mutated else "jax_op was told so (gradient=False)") + \
                "; give it one with register_autograd"
            self._rule = autograd.Refused(self._functional, why)
        self._library.impl(self._functional.name.split("::")[1], autograd.kernel(self._functional, self._gradient),
                           "Autograd")
        torch.library.register_vmap(self._functional.overload, self._functional.over_batch, lib=self._library)
        self._enums = tuple((at, p.name) for at, p in enumerate(of.parameters) if p.choices is not None)

    def _gradient(self) -> Any:
        if self._rule is None:
            self._rule = autograd.ByJax(self._functional)
        return self._rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._enums:
            args, kwargs = self._named(args, kwargs)
        return self.overload(*args, **kwargs)

    def _named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Members of enums by their names, which is what the operator takes."""
        positional = list(args)
        for at, name in self._enums:
            if at < len(positional) and isinstance(positional[at], enum.Enum):
                positional[at] = positional[at].name
            elif isinstance(kwargs.get(name), enum.Enum):
                kwargs = {**kwargs, name: kwargs[name].name}
        return tuple(positional), kwargs

    def register_autograd(self, backward: Callable[..., Any], /, *,
                          setup_context: Callable[..., Any] | None = None) -> None:
        """A gradient written with torch tensors, instead of jax.vjp. As torch.library.register_autograd:
        `setup_context(ctx, inputs, output)` saves, `backward(ctx, *grads)` gives one gradient (or None) an argument."""
        self._rule = autograd.ByUser(self._functional, backward, setup_context)

    def register_fake(self, fn: Callable[..., Any], /) -> Callable[..., Any]:
        """Another function that gives the results' shapes; the JAX function itself says them otherwise."""
        self._functional.fake = fn
        return fn

    def __deepcopy__(self, memo: Any) -> JaxOp:
        return self

    def __copy__(self) -> JaxOp:
        return self

    def __reduce__(self) -> str:
        """Pickled by its name, as a function is."""
        return self._qualname

    def __repr__(self) -> str:
        return f"<jax_op {self.overload._schema}>"


def jax_op(name: str, fn: Callable[..., Any] | None = None, /, *, gradient: bool = True,
           donate_argnums: int | Sequence[int] | None = None, mutates: dict[str, int] | None = None, x64: bool = False,
           mesh: Any = None, input_partition_specs: Any = None, output_partition_specs: Any = None) -> Any:
    """Makes a torch operator of a JAX function, which may call Pallas kernels. A call, or a decorator:

        @torch.tpu.pallas.jax_op("mine::rms_norm")
        def rms_norm(x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight

    The operator takes tensors where the function takes arrays. It runs in eager mode, is a part of compiled graphs and
    of programs compiled ahead, has its results' shapes from the function, and its gradient from jax.vjp, so that
    jax.custom_vjp is respected. On virtual chips Pallas kernels are interpreted, without interpret=True; for TPUs
    Mosaic compiles them. CPU tensors are computed by JAX on the CPU.

    Every parameter and the result are annotated: jax.Array or torch.Tensor, also Optional or in a list; int, float,
    bool, str, torch.dtype (the function gets NumPy's), Literal, Enum and lists of numbers are static, that is, each
    value makes a program of its own. A number that changes often should be a 0-d tensor. A result is an array, a tuple
    of fixed length or a list.

    The function sees JAX with the process's own settings: without jax_enable_x64, int64 tensors come as int32.

    Args:
        name: "namespace::name". A second definition of the name replaces the first.
        fn: the function.
        gradient: False if it has none; JaxOp.register_autograd gives one written with torch.
        donate_argnums: positions of tensor arguments whose memory the results may take over in eager mode. Such a
            tensor must not be used after the call; where its memory was taken, that is an error.
        mutates: parameters that the operator writes, as PyTorch's in-place operators do, and which of the function's
            results is the new value; those results are not returned. The memory is taken over.
        x64: the function computes with 64-bit types.
        mesh, input_partition_specs, output_partition_specs: the function is one of a jax.shard_map over this mesh, with
            a PartitionSpec an argument and a result.

    Raises:
        TypeError: an annotation is missing or means nothing to an operator; a float64 tensor without x64.
        ValueError: the name, positions, or partition specs.
    """
    if fn is None:
        return lambda f: jax_op(name, f, gradient=gradient, donate_argnums=donate_argnums, mutates=mutates, x64=x64,
                                mesh=mesh, input_partition_specs=input_partition_specs,
                                output_partition_specs=output_partition_specs)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"jax_op: {name!r} is no operator name; give namespace::name, for example \"mine::norm\"")
    found = signature.of(fn, name)
    if name.split("::")[0] in ("aten", "prim", "prims", "tpu", "c10d", "_c10d_functional"):
        raise ValueError(f"jax_op {name}: the namespace is PyTorch's or torch_tpu's own; choose another")
    fn = sharding.over(fn, found, name, mesh, input_partition_specs, output_partition_specs)
    return JaxOp(name, fn, gradient=gradient, donated=_donated(found, donate_argnums, name),
                 mutated=_mutated(found, mutates, name), x64=x64, of=found)


def _donated(found: signature.Signature, given: int | Sequence[int] | None, name: str) -> tuple[str, ...]:
    numbers = (given,) if isinstance(given, int) else tuple(given or ())
    for at in numbers:
        if not 0 <= at < len(found.parameters) or found.parameters[at].kind not in ("tensor", "tensor?"):
            raise ValueError(f"jax_op {name}: donate_argnums has {at}, which is the position of no tensor argument")
    return tuple(found.parameters[at].name for at in numbers)


def _mutated(found: signature.Signature, given: dict[str, int] | None, name: str) -> dict[str, int]:
    kinds = {p.name: p.kind for p in found.parameters}
    for parameter, place in (given or {}).items():
        if kinds.get(parameter) != "tensor":
            raise ValueError(f"jax_op {name}: mutates names {parameter!r}, which is no tensor parameter; they are "
                             f"{[n for n, k in kinds.items() if k == 'tensor']}")
        if not 0 <= place < found.results:
            raise ValueError(f"jax_op {name}: mutates says that result {place} is the new value of {parameter!r}; the "
                             f"function returns {max(0, found.results)} results")
    # In the order of the parameters, which is that of torch's functional forms.
    return {p.name: given[p.name] for p in found.parameters if given and p.name in given}
