"""Values that the CPU's kernels refuse: indices outside their dimension, integer division by zero, probabilities
outside [0, 1]. XLA raises nothing: it clamps or drops an index, and computes something defined for the rest.

Values that the host has anyway are always looked at: Python numbers, and small integer tensors that came from the host
(eager/bookkeeping.py). Those on the device only in debug mode, since each look waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..runtime import debug
from ..tensor import buffer
from . import bookkeeping, rules

Tensor = torch.Tensor
Given = dict[str, Any]
Look = Callable[[Tensor, Given], "Exception | None"]  # at the values of one argument, on the CPU

_RULES: dict[str, list[tuple[str, Look]]] = {}


def check(op: Any, given: Given) -> None:
    """Raises PyTorch's own error for a value that the CPU refuses, as far as values may be looked at.

    Args:
        op: an overload.
        given: its arguments by name.
    """
    for argument, look in _RULES.get(_packet(op), ()):
        value = _values(given.get(argument))
        if value is not None:
            error = look(value, given)
            if error is not None:
                raise type(error)(f"{error} ({op}, with {_describe(given)})")


def guard(op: Any) -> Callable[[Sequence[Any], dict[str, Any]], None] | None:
    """What looks at a call of an overload outside of debug mode: at values that the host knows. None: nothing to do."""
    packet, names = _packet(op), [argument.name for argument in op._schema.arguments]
    looked = [argument for argument, _ in _RULES.get(packet, ()) if argument in names]
    numbers = _NUMBERS.get(packet)
    if numbers is not None and numbers[0] in names:
        return _of_numbers(op, names, *numbers)
    if not looked or (packet in _DIVISIONS and "rounding_mode" not in names):
        return None
    where = [(names.index(argument), argument) for argument in dict.fromkeys(looked)]

    def run(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for position, name in where:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, Tensor):
                held = buffer.of(value)
                if held is None or held.mirror is None:
                    continue
                return check(op, {**dict(zip(names, args)), **kwargs})

    return run


def _packet(op: Any) -> str:
    return str(op).split(".")[1].removesuffix("_")


def _values(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or not value.numel():
        return None
    if value.is_cpu:
        return value
    found = bookkeeping.known(value)
    if found is None and debug.on():
        found = value.detach().cpu()
    return found


def _describe(given: Given) -> str:
    return ", ".join(f"{name} of shape {tuple(value.shape)}" for name, value in given.items()
                     if isinstance(value, Tensor)) or "no tensors"


def _rule(argument: str, *packets: str) -> Callable[[Look], Look]:
    def enter(look: Look) -> Look:
        for packet in packets:
            _RULES.setdefault(packet, []).append((argument, look))
        return look
    return enter


def _first(values: Tensor, wrong: Tensor) -> Any:
    return values[wrong][0].item()


# -- indices --

_OUT_OF_BOUNDS = "index {index} is out of bounds for dimension {dim} with size {size}"


def _indexed(argument: str, into: str, packets: str, kind: type[Exception], message: str) -> None:
    def look(index: Tensor, given: Given) -> Exception | None:
        indexed, dim = given[into], given.get("dim", 0)
        if not indexed.dim():
            return None
        size = indexed.shape[dim]
        low, high = (int(value) for value in index.aminmax())
        if low >= 0 and high < size:
            return None
        return kind(message.format(index=low if low < 0 else high, dim=dim, size=size))

    _rule(argument, *packets.split())(look)


_indexed("indices", "weight", "embedding", IndexError, "index out of range in self: {index}, of {size} rows")
_indexed("indices", "weight", "_embedding_bag _embedding_bag_forward_only", RuntimeError,
         "Index of input takes value {index} which is not in the valid range [0, {size})")
_indexed("index", "self", "index_select", IndexError,
         "index out of range in self: {index}, of {size} in dimension {dim}")
_indexed("index", "self", "gather scatter scatter_add scatter_reduce", RuntimeError, _OUT_OF_BOUNDS)
_indexed("index", "self", "index_add index_copy index_fill index_reduce", IndexError, _OUT_OF_BOUNDS)


@_rule("index", "take", "put")
def _flat(index: Tensor, given: Given) -> Exception | None:
    size = given["self"].numel()
    wrong = (index < -size) | (index >= size)
    return IndexError(f"out of range: tried to access index {_first(index, wrong)} on a tensor of {size} elements."
                      ) if wrong.any() else None


@_rule("target", "nll_loss_forward", "nll_loss2d_forward")
def _classes(target: Tensor, given: Given) -> Exception | None:
    scores = given["self"]
    if target.is_floating_point() or target.dim() != max(scores.dim() - 1, 0):
        return None
    size = scores.shape[min(1, scores.dim() - 1)]
    wrong = ((target < 0) | (target >= size)) & (target != given.get("ignore_index", -100))
    return IndexError(f"Target {_first(target, wrong)} is out of bounds.") if wrong.any() else None


def _last(scores: Tensor) -> int:
    return scores.shape[-1] if scores.dim() else 1


@_rule("target", "multi_margin_loss")
def _class(target: Tensor, given: Given) -> Exception | None:
    wrong = (target < 0) | (target >= _last(given["self"]))
    return RuntimeError(f"target out of range: {_first(target, wrong)}") if wrong.any() else None


@_rule("target", "multilabel_margin_loss_forward")
def _labels(target: Tensor, given: Given) -> Exception | None:
    wrong = (target < -1) | (target >= _last(given["self"]))
    return RuntimeError(f"argument #2 'target' is out of range: {_first(target, wrong)}") if wrong.any() else None


@_rule("indices", "max_unpool2d", "max_unpool3d")
def _unpooled(indices: Tensor, given: Given) -> Exception | None:
    size = torch.Size(given["output_size"])
    wrong = (indices < 0) | (indices >= size.numel())
    return RuntimeError(f"Found an invalid max index: {_first(indices, wrong)} (output volumes are of size "
                        f"{'x'.join(map(str, size))})") if wrong.any() else None


@_rule("LU_pivots", "lu_unpack")
def _pivots(pivots: Tensor, given: Given) -> Exception | None:
    size = given["LU_data"].shape[-2]
    return RuntimeError("pivots passed to lu_unpack must be between 1 and LU.size(-2) inclusive. Did you properly pass "
                        "the result of lu_factor?") if ((pivots < 1) | (pivots > size)).any() else None


@_rule("lengths", "segment_reduce")
def _lengths(lengths: Tensor, given: Given) -> Exception | None:
    if given.get("unsafe") or lengths.dim() > given["data"].dim():
        return None
    if (lengths < 0).any():
        return RuntimeError("lengths contains negative value!")
    return RuntimeError("segment_reduce(): Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1)"
                        " when !unsafe.") if (lengths.sum(-1) != given["data"].shape[lengths.dim() - 1]).any() else None


@_rule("mask", "masked_scatter")
def _source(mask: Tensor, given: Given) -> Exception | None:
    wanted = int(mask.expand(given["self"].shape).sum()) if mask.dim() <= given["self"].dim() else 0
    have = given["source"].numel()
    return RuntimeError(f"Number of elements of source < number of ones in mask: {have} < {wanted}"
                        ) if have < wanted else None


# -- division and powers of integers --

_ZERO = "ZeroDivisionError"
_DIVISIONS = ("div", "divide")
_POWER = "Integers to negative integer powers are not allowed."


@_rule("other", "floor_divide", "remainder", "fmod")
def _divisor(other: Tensor, given: Given) -> Exception | None:
    if other.is_floating_point() or other.is_complex() or not _whole(given["self"]):
        return None
    return RuntimeError(_ZERO) if (other == 0).any() else None


@_rule("other", *_DIVISIONS)
def _rounded(other: Tensor, given: Given) -> Exception | None:
    return _divisor(other, given) if given.get("rounding_mode") is not None else None


def _whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)


# -- samplers and losses of probabilities --

def _between(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


@_rule("self", "multinomial")
def _weights(weights: Tensor, given: Given) -> Exception | None:
    if not (weights.isfinite() & (weights >= 0)).all():
        return RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if (weights.sum(-1) <= 0).any():
        return RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    return None


@_rule("p", "bernoulli")
def _chances(p: Tensor, given: Given) -> Exception | None:
    return None if _between(p) else RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")


@_rule("self", "bernoulli")
def _own_chances(p: Tensor, given: Given) -> Exception | None:
    return None if "p" in given or not p.is_floating_point() else _chances(p, given)


@_rule("self", "poisson")
def _rate(rate: Tensor, given: Given) -> Exception | None:
    return None if (rate >= 0).all() else RuntimeError("invalid Poisson rate, expected rate to be non-negative")


@_rule("std", "normal")
def _deviation(std: Tensor, given: Given) -> Exception | None:
    return None if (std >= 0).all() else RuntimeError("normal expects all elements of std >= 0.0")


@_rule("self", "binary_cross_entropy")
def _probabilities(values: Tensor, given: Given) -> Exception | None:
    return None if _between(values) else RuntimeError("all elements of input should be between 0 and 1")


@_rule("target", "binary_cross_entropy")
def _soft_target(values: Tensor, given: Given) -> Exception | None:
    return None if _between(values) else RuntimeError("all elements of target should be between 0 and 1")


# -- Python numbers, looked at in every call --

def _divides(given: Given) -> Exception | None:
    other = given["other"]
    if isinstance(other, Tensor) and not other.dim():
        other = other.item()
    zero = isinstance(other, int) and other == 0 and given.get("rounding_mode", "") is not None
    return RuntimeError(_ZERO) if zero and _whole(given["self"]) else None


def _raises_to(given: Given) -> Exception | None:
    exponent, bases = given["exponent"], given["self"]
    if not isinstance(exponent, int) or exponent >= 0:
        return None
    return RuntimeError(_POWER) if any(map(_whole, bases if isinstance(bases, list | tuple) else [bases])) else None


def _chance(given: Given) -> Exception | None:
    p = given["p"]
    return RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}"
                        ) if not isinstance(p, Tensor) and not 0 <= p <= 1 else None


def _interval(given: Given) -> Exception | None:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}"
                        ) if low > high else None


def _integers(low: str, high: str) -> Callable[[Given], Exception | None]:
    def look(given: Given) -> Exception | None:
        start, end = given.get(low, 0), given.get(high)
        dtype = given["self"].dtype if "self" in given else given.get("dtype")
        if not isinstance(dtype, torch.dtype):
            dtype = torch.int64
        if isinstance(end, Tensor) or dtype.is_complex:
            return None
        if end is not None and start >= end:
            return RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={start} >= to={end}")
        least, most = (0, 1) if dtype == torch.bool else (
            (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).min,
            (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)
        for label, value in (("from", start), ("to - 1", None if end is None else end - 1)):
            if value is not None and not least <= value <= most:
                return RuntimeError(f"{label} is out of bounds for {rules.name(dtype)}: {value}")
        return None
    return look


# The argument that is looked at first: a call in which it is a device tensor needs no more than that look.
_NUMBERS: dict[str, tuple[str, Callable[[Given], Exception | None]]] = {
    "floor_divide": ("other", _divides), "remainder": ("other", _divides), "fmod": ("other", _divides),
    "div": ("rounding_mode", _divides), "divide": ("rounding_mode", _divides),
    "pow": ("exponent", _raises_to), "_foreach_pow": ("exponent", _raises_to),
    "bernoulli": ("p", _chance), "uniform": ("to", _interval),
    "random": ("to", _integers("from", "to")), "randint": ("high", _integers("low", "high")),
    "randint_like": ("high", _integers("low", "high")),
}


def _of_numbers(op: Any, names: list[str], first: str, look: Callable[[Given], Exception | None]
                ) -> Callable[[Sequence[Any], dict[str, Any]], None]:
    position = names.index("other" if first == "rounding_mode" else first)
    label = names[position]
    plain = label in ("other", "exponent")
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments
                if argument.has_default_value()}

    def run(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        value = args[position] if position < len(args) else kwargs.get(label)
        if plain and (type(value) is float or (type(value) is int and value > 0)):
            return
        if isinstance(value, Tensor) and not value.is_cpu:
            held = buffer.of(value)
            if held is not None and held.mirror is not None:
                check(op, {**defaults, **dict(zip(names, args)), **kwargs})
            return
        error = look({**defaults, **dict(zip(names, args)), **kwargs})
        if error is not None:
            raise error

    return run
