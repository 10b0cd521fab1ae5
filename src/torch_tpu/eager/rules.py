"""Arguments that PyTorch's kernels refuse and its Meta kernels let pass: operands of two dtypes, dtypes an operator has
no meaning for, sizes out of range. Asked once a program; XLA would promote, or compute something else.

The exceptions are those of the CPU's kernels, the messages have their gist.
"""

from __future__ import annotations

import functools
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
    ("self", "target"): ("binary_cross_entropy",),
    ("self", "other"): ("linalg_cross",),
    ("self", "values"): ("heaviside",),
    ("real", "imag"): ("complex",),
    ("abs", "angle"): ("polar",),
    ("x1", "x2"): ("_cdist_forward", "cdist"),
    ("self", "B"): ("linalg_solve_triangular",),
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

def _kinds(dtype: torch.dtype) -> str:
    """c (complex), f (floating), b (bool), i (integers), w (integers but uint8)."""
    if dtype.is_complex or dtype.is_floating_point:
        return "c" if dtype.is_complex else "f"
    return "b" if dtype == torch.bool else "i" if dtype == torch.uint8 else "iw"


def _refuse(kinds: str, packets: str, error: type[Exception] = NotImplementedError,
            message: str = '"{op}" not implemented for \'{dtype}\'', together: tuple[str, ...] = ()) -> None:
    """Operators that refuse some kinds of dtypes: of the first tensor and those beside it that are operands, or of what
    the tensors `together` are promoted to."""

    def rule(packet: str, given: Given) -> None:
        dtypes = [tensor.dtype for tensor in _tensors(given, *(together or ("self", "input", "other", "mat1", "data")))]
        if isinstance(given.get("other"), complex):
            dtypes.append(torch.complex64)
        if together and dtypes:
            dtypes = [functools.reduce(torch.promote_types, dtypes)]
        for dtype in dtypes:
            if set(kinds) & set(_kinds(dtype)):
                raise error(message.format(op=packet, dtype=name(dtype)))

    _rule(*packets.split())(rule)


_refuse("c", "lt le gt ge cummax cummin _cummax_helper _cummin_helper atan2 remainder fmod floor_divide gelu "
             "median nanmedian kthvalue mode frac nextafter copysign heaviside erf erfc erfinv lgamma digamma "
             "polygamma hypot i0 elu celu selu leaky_relu hardtanh hardswish hardsigmoid "
             "softplus softshrink hardshrink histc bucketize searchsorted "
             "logit igamma igammac special_i0e special_i1 special_i1e special_erfcx special_ndtri special_log_ndtr")
_refuse("c", "amax amin aminmax sign signbit threshold glu _prelu_kernel special_xlog1py xlogy special_entr "
             "hash_tensor _softmax _log_softmax _safe_softmax softmax log_softmax native_layer_norm native_group_norm "
             "fractional_max_pool2d fractional_max_pool3d binary_cross_entropy special_airy_ai special_bessel_j0 "
             "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_spherical_bessel_j0 "
             "special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l "
             "special_legendre_polynomial_p")
_refuse("cb", "argmax argmin", RuntimeError, "{op}(): does not support {dtype} input")
_refuse("b", "topk", RuntimeError, "topk does not support bool dtypes")
_refuse("c", "sort argsort topk msort", RuntimeError, "{op} does not support complex dtypes")
_refuse("c", "clamp clamp_min clamp_max relu relu6", NotImplementedError, "clamp is not supported for complex types")
_refuse("c", "floor ceil trunc round", NotImplementedError, "{op} is not supported for complex inputs")
_refuse("c", "maximum minimum fmax fmin", RuntimeError, "{op} not implemented for complex tensors.")
_refuse("cf", "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ "
              "__xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ gcd")
_refuse("cfb", "lcm")
_refuse("cib", "exponential cauchy log_normal poisson bernoulli_tensor _standard_gamma _sample_dirichlet binomial "
               "native_dropout")
_refuse("ib", "uniform normal normal_functional randn_like rand_like")
_refuse("ib", "_softmax _log_softmax softmax log_softmax hypot native_layer_norm native_group_norm")
_refuse("cib", "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d native_batch_norm "
               "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training "
               "_batch_norm_with_update log_sigmoid_forward mish nll_loss_forward nll_loss2d_forward segment_reduce "
               "upsample_linear1d upsample_trilinear3d multilabel_margin_loss_forward multi_margin_loss "
               "binary_cross_entropy_with_logits linalg_eigh _linalg_eigh histogram _histogramdd_bin_edges")
_refuse("ib", "celu elu frac gelu grid_sampler_2d grid_sampler_3d hardsigmoid hardswish hardshrink leaky_relu softplus "
              "softshrink logcumsumexp silu lerp glu rrelu_with_noise rrelu_with_noise_functional")
_refuse("i", "im2col max_unpool2d max_unpool3d")
_refuse("cbw", "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa "
               "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
               "_upsample_nearest_exact2d _upsample_nearest_exact3d")
_refuse("cb", "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices threshold")
_refuse("b", "mm bmm addmm addbmm baddbmm addmv mv dot vdot ceil floor trunc round kthvalue median nanmedian "
             "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
             "addcmul convolution convolution_overrideable bitwise_left_shift bitwise_right_shift gcd")
_refuse("b", "relu", RuntimeError, "Boolean inputs not supported for {op}")
_refuse("cib", "mse_loss smooth_l1_loss huber_loss", together=("self", "target"))
_refuse("cib", "logaddexp2", together=("self", "other"))
_refuse("ib", "logaddexp igamma igammac nextafter", together=("self", "other"))
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


@_rule("add", "sub", "rsub", "subtract")
def _alpha(packet: str, given: Given) -> None:
    alpha = given.get("alpha", 1)
    if type(alpha) is int:
        return
    kinds = {_kinds(tensor.dtype)[0] for tensor in _tensors(given, "self", "other")} | (
        {"f"} if isinstance(given["other"], float | complex) else set())
    if isinstance(alpha, bool) and kinds != {"b"}:
        raise RuntimeError("Boolean alpha only supported for Boolean results.")
    if isinstance(alpha, float) and kinds <= {"i", "b"}:
        raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")


@_rule("full", "full_like", "new_full")
def _filling(packet: str, given: Given) -> None:
    dtype = given.get("dtype") or (given["self"].dtype if "self" in given else None)
    if isinstance(given["fill_value"], complex) and dtype is not None and not dtype.is_complex:
        raise RuntimeError(f"value cannot be converted to type {name(dtype)} without overflow")


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
_index(IndexError, "index_fill", "{op}(): Expected dtype int64 for index but got: {dtype}", torch.int64)
_index(RuntimeError, "index_copy", "{op}(): Expected a long tensor for index, but got {dtype}", torch.int64)


@_rule("index_copy")
def _number_of_indices(packet: str, given: Given) -> None:
    index, source, dim = given["index"], given["source"], given["dim"]
    if source.dim() and -source.dim() <= dim < source.dim() and index.numel() != source.shape[dim]:
        raise IndexError(f"index_copy_(): Number of indices ({index.numel()}) should be equal to source.size(dim) "
                         f"({source.shape[dim]})")


@_rule("multi_margin_loss", "multilabel_margin_loss_forward")
def _long_target(packet: str, given: Given) -> None:
    if given["target"].dtype != torch.int64:
        raise RuntimeError(f"expected scalar type Long but found {name(given['target'].dtype)}")


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
    tensor = given["self"]
    dim = given.get("dim", -1 if packet in ("mode", "kthvalue") else None)
    if tensor.numel():
        return
    if dim is None:
        if packet in ("argmax", "argmin"):
            raise IndexError(f"{packet}(): Expected reduction dim to be specified for input.numel() == 0.")
        if packet in ("max", "min") and "other" not in given:
            raise RuntimeError(f"{packet}(): Expected reduction dim to be specified for input.numel() == 0. Specify "
                               "the reduction dim with the 'dim' argument.")
    elif isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == 0:
        raise IndexError(f"{packet}(): Expected reduction dim {dim} to have non-zero size.")


@_rule("amax", "amin", "aminmax")
def _empty_dimensions(packet: str, given: Given) -> None:
    tensor, dims = given["self"], given.get("dim")
    for dim in [dims] if isinstance(dims, int) else dims or []:
        if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == 0:
            raise IndexError(f"{packet}(): Expected reduction dim {dim} to have non-zero size.")


@_rule("_softmax", "_log_softmax", "softmax", "log_softmax", "sort", "argsort")
def _dimension(packet: str, given: Given) -> None:
    rank, dim = max(given["self"].dim(), 1), given.get("dim", -1)
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")


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
