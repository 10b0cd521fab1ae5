"""Arguments that PyTorch's kernels refuse and its Meta kernels let pass: operands of two dtypes, dtypes an operator has
no meaning for, sizes out of range. Asked once a program; XLA would promote, or compute something else.

The exceptions are those of the CPU's kernels, the messages have their gist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Given = dict[str, Any]
Rule = Callable[[str, Given], None]

_NAMES = {torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
          torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
          torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble"}

_RULES: dict[str, list[Rule]] = {}


def check(op: Any, given: Given) -> None:
    """Raises what the CPU's kernel raises; `given` are the operator's arguments by name (only dtypes and sizes are
    looked at)."""
    packet = str(op).split(".")[1].removesuffix("_")
    for rule in _RULES.get(packet, ()):
        rule(packet, given)


def name(dtype: torch.dtype) -> str:
    """PyTorch's own name of a dtype in its messages."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _rule(*packets: str) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        for packet in packets:
            _RULES.setdefault(packet, []).append(rule)
        return rule
    return enter


def _tensors(given: Given, *names: str) -> list[Tensor]:
    return [given[name] for name in names if isinstance(given.get(name), Tensor)]


# -- operands of one dtype --

_SAME: dict[tuple[str, ...], tuple[str, ...]] = {
    ("self", "mat2"): ("mm", "bmm"),
    ("self", "mat1", "mat2"): ("addmm", "sspaddmm"),
    ("self", "batch1", "batch2"): ("baddbmm", "addbmm"),
    ("self", "vec"): ("mv",),
    ("self", "mat", "vec"): ("addmv",),
    ("input", "weight", "bias"): ("linear", "convolution", "convolution_overrideable", "_convolution"),
    ("self", "weight"): ("nll_loss_forward", "nll_loss2d_forward", "prelu", "_prelu_kernel"),
    ("self", "source"): ("index_add", "index_copy", "put"),
    ("input", "grid"): ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
}


def _same(names: tuple[str, ...]) -> Rule:
    def rule(packet: str, given: Given) -> None:
        tensors = _tensors(given, *names)
        wanted = tensors[0].dtype
        for label, tensor in zip([n for n in names if isinstance(given.get(n), Tensor)][1:], tensors[1:]):
            if tensor.dtype != wanted:
                first = names[0]
                raise RuntimeError(f"{packet}: expected {first} and {label} to have the same dtype, but got scalar "
                                   f"type {name(wanted)} for {first} and {name(tensor.dtype)} for {label}")
    return rule


for _names, _packets in _SAME.items():
    _rule(*_packets)(_same(_names))


@_rule("native_layer_norm", "native_batch_norm", "native_group_norm", "_native_batch_norm_legit", "layer_norm",
       "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
       "_batch_norm_no_update", "batch_norm", "group_norm", "_batch_norm_with_update_functional")
def _norm(packet: str, given: Given) -> None:
    """Parameters in the input's dtype; or all in float32, for an input of half precision."""
    inputs = _tensors(given, "input")
    if not inputs:
        return
    dtype = inputs[0].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    for tensor in _tensors(given, "weight", "bias", "running_mean", "running_var"):
        if tensor.dtype != dtype and not (half and tensor.dtype == torch.float32):
            raise RuntimeError(f"{packet}: mixed dtype: expect parameter to have scalar type of "
                               f"{name(dtype)}{' or Float' if half else ''}, but got {name(tensor.dtype)}")


# -- dtypes without meaning --

def _refuse(kinds: str, packets: str, error: type[Exception] = NotImplementedError,
            message: str = '"{op}" not implemented for \'{dtype}\'') -> None:
    """kinds: some of c (complex), f (floating), i (integers), b (bool). Looks at the first tensor and those beside it
    that are operands."""

    def rule(packet: str, given: Given) -> None:
        for tensor in _tensors(given, "self", "input", "other", "mat1"):
            dtype = tensor.dtype
            kind = ("c" if dtype.is_complex else "f" if dtype.is_floating_point else
                    "b" if dtype == torch.bool else "i")
            if kind in kinds:
                raise error(message.format(op=packet, dtype=name(dtype)))

    _rule(*packets.split())(rule)


_refuse("c", "lt le gt ge cummax cummin _cummax_helper _cummin_helper atan2 remainder fmod floor_divide gelu "
             "median nanmedian kthvalue mode frac nextafter copysign heaviside erf erfc erfinv lgamma digamma "
             "polygamma hypot i0 elu celu selu leaky_relu hardtanh hardswish hardsigmoid "
             "softplus softshrink hardshrink histc bucketize searchsorted "
             "logit igamma igammac special_i0e special_i1 special_i1e special_erfcx special_ndtri special_log_ndtr")
_refuse("c", "argmax argmin amax amin aminmax", RuntimeError, "{op}(): does not support complex input")
_refuse("c", "sort argsort topk msort", RuntimeError, "{op} does not support complex dtypes")
_refuse("c", "clamp clamp_min clamp_max relu relu6", NotImplementedError, "clamp is not supported for complex types")
_refuse("c", "floor ceil trunc round", NotImplementedError, "{op} is not supported for complex inputs")
_refuse("c", "maximum minimum fmax fmin", RuntimeError, "{op} not implemented for complex tensors.")
_refuse("cf", "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ "
              "__xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ gcd")
_refuse("cfb", "lcm")
_refuse("cib", "uniform normal normal_functional exponential cauchy log_normal poisson bernoulli_tensor randn_like "
               "rand_like _standard_gamma _sample_dirichlet binomial native_dropout")
_refuse("ib", "_softmax _log_softmax softmax log_softmax hypot native_layer_norm native_group_norm")
_refuse("ib", "std var std_mean var_mean", RuntimeError, "{op} only support floating point and complex dtypes")
_refuse("cib", "multinomial", RuntimeError, "multinomial only supports floating-point dtypes for input, got: {dtype}")


@_rule("max", "min")
def _order(packet: str, given: Given) -> None:
    if given["self"].dtype.is_complex:
        if "dim" in given:
            raise RuntimeError(f"{packet}(): does not support complex input")
        raise NotImplementedError(f'"{packet}_all" not implemented for \'{name(given["self"].dtype)}\'')


@_rule("div", "divide", "true_divide")
def _rounding(packet: str, given: Given) -> None:
    if given.get("rounding_mode") is not None:
        for tensor in _tensors(given, "self", "other"):
            if tensor.dtype.is_complex:
                raise NotImplementedError(f'"div_{given["rounding_mode"]}" not implemented for '
                                          f"'{name(tensor.dtype)}'")


@_rule("bernoulli")
def _bernoulli(packet: str, given: Given) -> None:
    """The form whose probabilities are the tensor itself."""
    if "p" not in given and not given["self"].is_floating_point():
        raise NotImplementedError(f'"bernoulli_tensor" not implemented for \'{name(given["self"].dtype)}\'')


@_rule("rsub", "sub", "subtract")
def _subtraction(packet: str, given: Given) -> None:
    other = given.get("other")
    if given["self"].dtype == torch.bool and (isinstance(other, bool) or packet == "rsub" or
                                              (isinstance(other, Tensor) and other.dtype == torch.bool)):
        raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying to "
                           "invert a mask, use the `~` or `logical_not()` operator instead.")


@_rule("rand", "randn")
def _floating(packet: str, given: Given) -> None:
    dtype = given.get("dtype")
    if isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(f'"{packet}" not implemented for \'{name(dtype)}\'')


# -- indices and targets --

def _index(error: type[Exception], packets: str, message: str, *dtypes: torch.dtype) -> None:
    def rule(packet: str, given: Given) -> None:
        for index in _tensors(given, "index"):
            if index.dtype not in dtypes:
                raise error(message.format(op=packet, dtype=name(index.dtype)))

    _rule(*packets.split())(rule)


_index(RuntimeError, "index_select index_add index_reduce",
       "{op}(): Expected dtype int32 or int64 for index but got: {dtype}", torch.int64, torch.int32)
_index(IndexError, "index_fill index_copy", "{op}(): Expected dtype int64 for index but got: {dtype}", torch.int64)


@_rule("index_select")
def _vector(packet: str, given: Given) -> None:
    if given["index"].dim() > 1:
        raise IndexError(f"{packet}(): Index is supposed to be a vector")


@_rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "nll_loss_nd")
def _target(packet: str, given: Given) -> None:
    target, scores, weight = given["target"], given["self"], given.get("weight")
    if target.dtype not in (torch.int64, torch.uint8):
        if packet.startswith("nll_loss2d") or (target.dtype != torch.int32 and not target.is_floating_point()):
            raise RuntimeError(f"expected scalar type Long but found {name(target.dtype)}")
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {name(target.dtype)}")
    if weight is not None and scores.dim() and weight.numel() != scores.shape[min(1, scores.dim() - 1)]:
        raise RuntimeError(f"weight tensor should be defined either for all {scores.shape[min(1, scores.dim() - 1)]} "
                           f"classes or no classes but got weight tensor of shape: {list(weight.shape)}")


@_rule("bucketize")
def _boundaries(packet: str, given: Given) -> None:
    boundaries = given.get("boundaries")
    if isinstance(boundaries, Tensor) and boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")


# -- sizes and dimensions --

@_rule("max", "min", "argmax", "argmin", "median", "nanmedian", "mode", "kthvalue")
def _empty(packet: str, given: Given) -> None:
    tensor, dim = given["self"], given.get("dim")
    if tensor.numel():
        return
    if "dim" not in given or dim is None:
        if packet in ("argmax", "argmin"):
            raise IndexError(f"{packet}(): Expected reduction dim to be specified for input.numel() == 0.")
        if packet in ("max", "min") and "other" not in given:
            raise RuntimeError(f"{packet}(): Expected reduction dim to be specified for input.numel() == 0. Specify "
                               "the reduction dim with the 'dim' argument.")
    elif isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == 0:
        raise IndexError(f"{packet}(): Expected reduction dim {dim} to have non-zero size.")


@_rule("_softmax", "_log_softmax", "softmax", "log_softmax")
def _dimension(packet: str, given: Given) -> None:
    rank = max(given["self"].dim(), 1)
    if not -rank <= given["dim"] < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got "
                         f"{given['dim']})")


@_rule("convolution", "convolution_overrideable")
def _convolution(packet: str, given: Given) -> None:
    weight, bias = given["weight"], given.get("bias")
    if any(value < 0 for value in given["padding"]):
        raise RuntimeError("negative padding is not supported")
    if any(value <= 0 for value in given["stride"]):
        raise RuntimeError("non-positive stride is not supported")
    if any(value <= 0 for value in given["dilation"]):
        raise RuntimeError("dilation should be greater than zero")
    if bias is not None:
        channels = weight.shape[1] * given["groups"] if given["transposed"] else weight.shape[0]
        if bias.dim() != 1 or bias.shape[0] != channels:
            raise RuntimeError(f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with "
                               f"{channels} elements, but got bias of size {list(bias.shape)} instead")


@_rule("clamp")
def _bounds(packet: str, given: Given) -> None:
    if given.get("min") is None and given.get("max") is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")


@_rule("multinomial")
def _samples(packet: str, given: Given) -> None:
    wanted, rank = given["num_samples"], given["self"].dim()
    if rank not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if wanted <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not given.get("replacement", False) and wanted > given["self"].shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")


@_rule("randperm")
def _permutation(packet: str, given: Given) -> None:
    dtype = given.get("dtype")
    if isinstance(dtype, torch.dtype):
        top = (torch.iinfo(dtype).max if not dtype.is_floating_point else int(2 / torch.finfo(dtype).eps))
        if dtype != torch.bool and given["n"] > top + 1:
            raise RuntimeError(f"value cannot be converted to type {name(dtype)} without overflow: n={given['n']}")


@_rule("native_dropout", "dropout", "_fused_dropout")
def _probability(packet: str, given: Given) -> None:
    if not 0 <= given["p"] <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {given['p']}")
