"""What PyTorch itself says about a call: result shapes, dtypes and strides, and its errors for wrong arguments.

Asked once a program, by running the operator on meta tensors; so a wrong shape or dtype raises torch's own message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import rules
from .plan import Plan, overload

# Operators whose Meta kernel is missing or answers for another device's layout.
_NO_META: set[str] = {
    "aten._native_batch_norm_legit_no_training.default",  # statistics of shape (C,); real devices give none
    "aten._weight_int4pack_mm.default",  # asks fake tensors which device they are of, and meta tensors are none
}

# Operators without a Meta kernel, and one that takes the same arguments and gives the same results.
_STAND_IN: dict[str, str] = {"aten.convolution_overrideable.default": "aten.convolution.default"}


# Operators whose Meta kernel is Python and refuses a 0-d CPU tensor, which the device's kernels take as a number.
_ONE_DEVICE = {"aten.masked_fill.Tensor", "aten.masked_fill_.Tensor"}

# Operators whose out= has the result's own dtype, where the Meta kernels do not ask for it. Others cast.
_EXACT = frozenset({
    "amax", "amin", "aminmax", "conj_physical", "linalg_cross", "cummax", "cummin", "frexp", "heaviside", "histc",
    "index_add", "index_copy", "index_select", "kthvalue", "linalg_qr", "linalg_lu", "linalg_lu_solve",
    "linalg_solve_triangular", "logcumsumexp", "lu_unpack", "mode", "msort", "nan_to_num", "neg", "avg_pool3d",
    "gelu", "hardshrink", "log_sigmoid_forward", "softplus", "softshrink", "ormqr", "round", "scatter_reduce",
    "slice_scatter", "_softmax", "_log_softmax", "sort", "take", "tril", "triu", "unfold_copy"})


def expect(plan: Plan, given: dict[str, Any]) -> Any:
    """Meta tensors for the functional overload's results; None where PyTorch cannot say.

    Raises whatever PyTorch raises for these arguments.
    """
    rules.check(plan.functional, given)
    if str(plan.functional) in _NO_META:
        return None
    op = plan.functional
    if str(op) in _STAND_IN:
        op = overload(_STAND_IN[str(op)])
    if plan.writes and not plan.out and str(plan.op) not in _NO_META and not plan.fresh and len(plan.writes) == 1:
        # The in-place form also checks that the result fits its first argument.
        checked = _call(plan.op, given)
        if isinstance(checked, Exception):
            raise checked
    result = _call(op, given)
    if isinstance(result, Exception):
        raise result
    if plan.out and result is not None:
        _check_out(plan, given, flat(result))
    return result


def _check_out(plan: Plan, given: dict[str, Any], results: list[torch.Tensor]) -> None:
    """Raises what the out= form says about the dtypes of its out= arguments; their sizes are the results' here."""
    outs = [name for name, _ in plan.writes]
    if len(results) == len(outs) and all(isinstance(given[name], torch.Tensor) for name in outs):
        made = {name: torch.empty_like(meta, dtype=given[name].dtype) for name, meta in zip(outs, results)}
        checked = _call(plan.op, {**given, **made})
        if isinstance(checked, Exception):
            raise checked
        for name, meta in zip(outs, results):
            if meta.dtype != made[name].dtype and str(plan.functional).split(".")[1] in _EXACT:
                raise RuntimeError(f"Expected out tensor to have dtype {rules.name(meta.dtype)}, but got "
                                   f"{rules.name(made[name].dtype)} instead")


def _call(op: Any, given: dict[str, Any]) -> Any:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.name not in given:
            if not argument.has_default_value():
                return None
            continue
        value = pytree.tree_map_only(torch.Tensor, _whole if str(op) in _ONE_DEVICE else _meta, given[argument.name])
        if argument.name == "device" and value is not None:
            value = torch.device("meta")
        if argument.name == "generator":
            value = None
            if argument.has_default_value():
                continue
        if argument.kwarg_only or kwargs or len(args) < _position(op, argument.name):
            kwargs[argument.name] = value
        else:
            args.append(value)
    try:
        with torch._C._DisableTorchDispatch():
            return op(*args, **kwargs)
    except NotImplementedError:
        return None
    except AssertionError as error:  # of a Meta kernel in Python
        return RuntimeError(str(error))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        text = str(error)
        if "meta" in text.lower() or "Tensor.item" in text or "data-dependent" in text.lower():
            return None
        return error


def _position(op: Any, name: str) -> int:
    return [a.name for a in op._schema.arguments].index(name)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" and tensor.dim() == 0 else _whole(tensor)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def flat(expected: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
