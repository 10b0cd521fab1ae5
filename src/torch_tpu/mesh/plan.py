"""From a model to the layout of each of its parameters: by its own tensor-parallel plan, by rules, and by size."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.partition import Spec

Rules = Mapping[str, Any]

# The styles of a Transformers plan (transformers.distributed.tensor_parallel), as the dimension of the weight that they
# divide. XLA adds what a layout needs around a layer, so every layout gives the same numbers: a style says only where
# the least is to be exchanged.
_ROWS = {"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "embedding_rowwise", "local_colwise",
         "grouped_gemm", "mla_kv_a_proj"}
_COLUMNS = {"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise", "local_rowwise"}


@dataclass(frozen=True)
class Layout:
    """How one parameter or buffer is spread.

    Attributes:
        name: its name in the model.
        shape: its shape.
        nbytes: of the whole.
        spec: for each dimension None, or the name (or names) of the mesh axes that divide it.
        why: where the layout comes from.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    spec: Spec
    why: str

    def chip_bytes(self, axes: Mapping[str, int]) -> int:
        """Bytes that one chip holds."""
        return self.nbytes // math.prod(axes[name] for name in _names(self.spec))


def _names(spec: Spec) -> Iterator[str]:
    for part in spec:
        if part is not None:
            yield from (part,) if isinstance(part, str) else part


def layouts(model: torch.nn.Module, axes: Mapping[str, int], rules: Rules | None = None, tp: str = "tp",
            fsdp: str = "fsdp") -> list[Layout]:
    """The layout of every parameter and buffer; a tensor that has several names is listed once, under the first.

    Args:
        model: any module; parameters may be on meta.
        axes: the names and sizes of the mesh's axes.
        rules: for names that match a pattern (`*` stands for anything), the layout, a tuple of axis names and None.
            They come before the model's own plan. The last pattern that matches counts.
        tp: the axis along which the model's plan divides; one that the mesh lacks divides nothing.
        fsdp: the axis along which every parameter is divided further, by its largest dimension that it divides.

    Raises:
        ValueError: a rule names an axis that the mesh lacks, or does not suit the shape of a parameter it matches, or
            matches nothing.
    """
    from ..tensor import placement

    plan = _plan_of(model)
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    parameters = {id(parameter) for parameter in model.parameters()}
    turned = {id(parameter) for module in model.modules() if getattr(module, "inputs_first", False)
              for parameter in module.parameters(recurse=False)}
    used: set[str] = set()
    found = []
    for key, tensor in tensors.items():
        shape, own = tuple(tensor.shape), names[key]
        rule = next((pattern for pattern in reversed(list(rules or {}))
                     if any(fnmatch.fnmatchcase(name, pattern) for name in own)), None)
        if rule is not None:
            used.update(pattern for pattern in rules or {} if any(fnmatch.fnmatchcase(n, pattern) for n in own))
            spec, why = _as_spec((rules or {})[rule]), f"rule {rule}"
            try:
                placement.check(dict(axes), shape, spec)
            except ValueError as error:
                raise ValueError(f"{why}, for {own[0]}: {error}") from None
        elif key not in parameters:
            spec, why = (), "a buffer"
        else:
            spec, why = _by_plan(own, shape, plan, axes, tp, key in turned)
            if axes.get(fsdp, 1) > 1 and len(shape) > 1:  # gathering a vector costs more than it saves
                spec, why = _further(shape, spec, axes, fsdp, why)
        found.append(Layout(own[0], shape, tensor.numel() * tensor.element_size(), spec, why))
    unused = [pattern for pattern in rules or {} if pattern not in used]
    if unused:
        some = [own[0] for own in names.values()]
        raise ValueError(f"no parameter or buffer is called {', '.join(map(repr, unused))}; names are such as "
                         f"{', '.join(dict.fromkeys([some[0], some[len(some) // 2], some[-1]]))}" if some else
                         "rules for a module without parameters")
    return found


def _as_spec(value: Any) -> Spec:
    if value is None or isinstance(value, str):
        return (value,)
    return tuple(tuple(part) if isinstance(part, list) else part for part in value)


def _plan_of(model: torch.nn.Module) -> dict[str, str]:
    """The plan of a Transformers model, pattern by pattern; empty for a module that has none."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    return {pattern: style for pattern, style in dict(plan).items() if isinstance(style, str)}


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """The style of a parameter, from an entry of its own or of its module's."""
    generic = ".".join("*" if part.isdigit() else part for part in name.split("."))
    for candidate in (generic, generic.rpartition(".")[0]):
        if candidate in plan:
            return plan[candidate]
    return None


def _by_plan(names: list[str], shape: tuple[int, ...], plan: Mapping[str, str], axes: Mapping[str, int],
             tp: str, turned: bool) -> tuple[Spec, str]:
    """`turned`: the parameter's dimensions are those of an nn.Linear's weight the other way round."""
    size = axes.get(tp, 1)
    if size == 1:
        return (), "no tensor parallelism"
    styles = [style for style in (_style(name, plan) for name in names) if style is not None]
    if not plan:
        return _further(shape, (), axes, tp, "the model has no plan") if len(shape) > 1 else ((), "small")
    for style in styles:
        dim = _divided(style, shape)
        if dim is None:
            continue
        if turned and len(shape) > 1:
            dim = 2 * len(shape) - 3 - dim
        if shape[dim] % size == 0:
            return (*(None,) * dim, tp), f"plan: {style}"
        if len(shape) > 1:
            return _further(shape, (), axes, tp, f"plan: {style}, but {shape[dim]} is no multiple of {size}")
        return (), f"plan: {style}, but {shape[dim]} is no multiple of {size}"
    return (), f"plan: {styles[0]}" if styles else "not in the model's plan"


def _divided(style: str, shape: tuple[int, ...]) -> int | None:
    """The dimension that a style divides: of experts' stacked weights the same one, after that of the experts."""
    if style in _ROWS:
        return max(len(shape) - 2, 0)
    if style in _COLUMNS and len(shape) > 1:
        return len(shape) - 1
    return None


def _further(shape: tuple[int, ...], spec: Spec, axes: Mapping[str, int], axis: str, why: str) -> tuple[Spec, str]:
    """Divides the largest dimension that is free and that the axis divides."""
    full = [*spec, *(None,) * (len(shape) - len(spec))]
    free = [dim for dim, part in enumerate(full) if part is None and shape[dim] and shape[dim] % axes[axis] == 0]
    if not free:
        return spec, f"{why}; no dimension of {shape} is a multiple of {axis}={axes[axis]}"
    dim = max(free, key=lambda d: (shape[d], -d))
    full[dim] = axis
    return tuple(full), f"{why}; {axis} by size"
