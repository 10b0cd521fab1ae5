"""torch.nn on a device that PyTorch cannot shallow-copy to (torch 2.13: `_has_compatible_shallow_copy_type` has a fixed
list of devices): `model.to("tpu")` would make new Parameters, which unties tied weights and leaves optimizers with the
old ones. The parameters are swapped in place instead, for the duration of the move only.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Parameter = torch.nn.Parameter
_data: Any = torch._C.TensorBase.data


class _Moving(threading.local):
    active = False


_moving = _Moving()


def _crosses(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether fn takes parameters of this module to the tpu or away from it."""
    parameters = list(module.parameters())
    if not parameters or any(type(p) is not _Parameter for p in parameters):
        return False  # DTensors and lazy parameters have their own ways
    target = _destination(fn, parameters[0])
    return target is not None and any(
        p.device.type != target and "tpu" in (p.device.type, target) for p in parameters)


def _destination(fn: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor) -> str | None:
    """The type of device where fn puts a tensor like the parameter; None where fn does not take an empty tensor."""
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    try:
        with torch.no_grad():
            result = fn(probe)
    except Exception:  # an arbitrary function of a library's: what is wrong with it shows in the real call
        return None
    return result.device.type if isinstance(result, torch.Tensor) else None


def _slots(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield part, name, parameter


def _swappable(parameter: torch.Tensor) -> bool:
    """Whether torch.utils.swap_tensors will take it: no weak reference, no graph that still needs it."""
    import weakref

    return not weakref.getweakrefs(parameter) and parameter._use_count() <= 2  # type: ignore[attr-defined]


def _move(theirs: Callable[..., Any], module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor],
          recurse: bool) -> Any:
    before = list(_slots(module))
    for part in module.modules():
        if isinstance(part, torch.nn.RNNBase):  # holds weak references to its weights; it renews both after the move
            part._flat_weight_refs = []
            part._flat_weights = []
    if all(_swappable(parameter) for _, _, parameter in before):
        kept = {id(p): (p, dict(p.__dict__), p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
                for _, _, p in before}
        flag = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            result = theirs(module, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(flag)
        for parameter, attributes, hooks, after_hooks in kept.values():
            parameter.__dict__.update(attributes)
            if hooks is not None:
                parameter._backward_hooks = hooks
            if after_hooks is not None:
                parameter._post_accumulate_grad_hooks = after_hooks  # type: ignore[attr-defined]
        return result
    result = theirs(module, fn, recurse)
    moved: dict[int, torch.nn.Parameter] = {}
    for part, name, old in before:
        new = part._parameters[name]
        if new is None or new is old:
            continue
        first = moved.setdefault(id(old), new)
        if first is not new:
            part._parameters[name] = first
        elif old.__dict__:
            new.__dict__.update(old.__dict__)
    for part in module.modules():
        if isinstance(part, torch.nn.RNNBase):
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]
            part._init_flat_weights()
    return result


def _replace_data(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """`parameter.data = value` between devices: the same object, with the value's data; no gradient."""
    new = _Parameter(value.detach(), requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    parameter.grad = None
    torch.utils.swap_tensors(parameter, new)


def _get_data(self: torch.nn.Parameter) -> torch.Tensor:
    return _data.__get__(self)


def _set_data(self: torch.nn.Parameter, value: torch.Tensor) -> None:
    if isinstance(value, torch.Tensor) and value.device.type != self.device.type \
            and "tpu" in (value.device.type, self.device.type) and type(self) is _Parameter:
        _replace_data(self, value)
    else:
        _data.__set__(self, value)


def install() -> None:
    theirs = torch.nn.Module._apply

    @functools.wraps(theirs)
    def _apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if _moving.active or not _crosses(self, fn):
            return theirs(self, fn, recurse)
        _moving.active = True
        try:
            return _move(theirs, self, fn, recurse)
        finally:
            _moving.active = False

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    _Parameter.data = property(_get_data, _set_data)  # type: ignore[assignment,misc]
