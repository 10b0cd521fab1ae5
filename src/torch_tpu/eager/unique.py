"""unique and its kin: one program finds the distinct elements, then their number is read and the results are cut."""

from __future__ import annotations

from typing import Any

import torch

from ..lowering import unique as distinct
from . import function
from .kernels import kernel


def _cut(fn: Any, tensor: torch.Tensor, inverse: bool,
         counts: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nothing = torch.empty(0, dtype=torch.int64, device=tensor.device)
    values, places, sizes, count = function.call(fn, tensor)
    n = int(count.item())
    return (values[:n].clone(), places if inverse else nothing, sizes[:n].clone() if counts else nothing)


@kernel("aten._unique2.default")
def unique2(tensor: torch.Tensor, sorted: bool = True, return_inverse: bool = False,
            return_counts: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if tensor.numel() == 0:
        return _empty(tensor.new_empty(0), tensor.shape, return_inverse)
    return _cut(distinct.unique, tensor, return_inverse, return_counts)


@kernel("aten._unique.default")
def unique(tensor: torch.Tensor, sorted: bool = True,
           return_inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return unique2(tensor, sorted, return_inverse)[:2]


@kernel("aten.unique_consecutive.default")
def unique_consecutive(tensor: torch.Tensor, return_inverse: bool = False, return_counts: bool = False,
                       dim: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if dim is not None:
        return unique_dim_consecutive(tensor, dim, return_inverse, return_counts)
    if tensor.numel() == 0:
        return _empty(tensor.new_empty(0), tensor.shape, return_inverse)
    return _cut(distinct.unique_consecutive, tensor, return_inverse, return_counts)


@kernel("aten.unique_dim.default")
def unique_dim(tensor: torch.Tensor, dim: int, sorted: bool = True, return_inverse: bool = False,
               return_counts: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # torch returns all three here, asked for or not
    return _along(distinct.unique_rows, tensor, dim)


@kernel("aten.unique_dim_consecutive.default")
def unique_dim_consecutive(tensor: torch.Tensor, dim: int, return_inverse: bool = False,
                           return_counts: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _along(distinct.unique_consecutive_rows, tensor, dim)


def _along(fn: Any, tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if tensor.shape[dim] == 0:
        if sum(n == 0 for n in tensor.shape) > 1:
            raise RuntimeError("Number of zero sized dimensions is more than one, so unique cannot be applied ")
        return _empty(tensor.clone(), (0,), True)
    values, inverse, counts = _cut(fn, tensor.movedim(dim, 0), True, True)
    return values.movedim(0, dim), inverse, counts


def _empty(values: torch.Tensor, shape: Any, inverse: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options: Any = {"dtype": torch.int64, "device": values.device}
    return values, torch.empty(shape if inverse else 0, **options), torch.empty(0, **options)
