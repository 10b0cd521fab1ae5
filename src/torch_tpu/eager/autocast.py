"""The rules of torch.autocast("tpu"): which operators run in the low precision, which in float32, which in the widest
of their inputs. They follow PyTorch's lists for CUDA (aten/src/ATen/autocast_mode.h, torch 2.13).

Unlike CUDA's, a weight's low-precision copy is not kept for the region: it would have to outlive no update of the
weight, XLA fuses the cast into the operator in compiled code, and gradients then add up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_KEY = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
_EXCLUDED = torch._C.DispatchKeySet(_KEY)

LOW = [
    "_convolution.deprecated", "_convolution.default", "conv1d.default", "conv1d.padding", "conv2d.default",
    "conv2d.padding", "conv3d.default", "conv3d.padding", "conv_tbc.default", "conv_transpose1d.default",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution.default", "prelu.default", "addmm.default",
    "addmv.default", "addr.default", "matmul.default", "einsum.default", "mm.default", "mv.default",
    "linalg_vecdot.default", "linear.default", "addbmm.default", "baddbmm.default", "bmm.default",
    "chain_matmul.default", "linalg_multi_dot.default", "_thnn_fused_lstm_cell.default",
    "_thnn_fused_gru_cell.default", "lstm_cell.default", "gru_cell.default", "rnn_tanh_cell.default",
    "rnn_relu_cell.default", "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default", "scaled_dot_product_attention.default",
    "_grouped_mm.default",
]

FULL = [
    "acos.default", "asin.default", "cosh.default", "erfinv.default", "exp.default", "expm1.default",
    "log.default", "log10.default", "log2.default", "log1p.default", "reciprocal.default", "rsqrt.default",
    "sinh.default", "tan.default", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus.default",
    "layer_norm.default", "native_layer_norm.default", "group_norm.default", "frobenius_norm.dim",
    "nuclear_norm.default", "nuclear_norm.dim", "cosine_similarity.default", "poisson_nll_loss.default",
    "cosine_embedding_loss.default", "nll_loss.default", "nll_loss2d.default", "nll_loss_nd.default",
    "cross_entropy_loss.default", "hinge_embedding_loss.default", "kl_div.default", "l1_loss.default",
    "smooth_l1_loss.default", "huber_loss.default", "mse_loss.default", "margin_ranking_loss.default",
    "multilabel_margin_loss.default", "soft_margin_loss.default", "triplet_margin_loss.default",
    "multi_margin_loss.default", "binary_cross_entropy_with_logits.default", "dist.default", "pdist.default",
    "cdist.default", "renorm.default", "logsumexp.default", "upsample_nearest1d.default",
    "_upsample_nearest_exact1d.default", "upsample_nearest2d.default", "_upsample_nearest_exact2d.default",
    "upsample_nearest3d.default", "_upsample_nearest_exact3d.default", "upsample_linear1d.default",
    "upsample_bilinear2d.default", "_upsample_bilinear2d_aa.default", "upsample_trilinear3d.default",
    "upsample_bicubic2d.default", "_upsample_bicubic2d_aa.default", "norm.Scalar", "norm.ScalarOpt_dim",
    "norm.names_ScalarOpt_dim",
]

# float32 results by the operator's own dtype argument, where it is not given.
FULL_BY_DTYPE = [
    "prod.default", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod.default", "cumsum.default",
    "linalg_vector_norm.default", "linalg_matrix_norm.default", "linalg_matrix_norm.str_ord", "sum.default",
    "sum.dim_IntList",
]

WIDEST = [
    "addcdiv.default", "addcmul.default", "atan2.default", "bilinear.default", "cross.default", "dot.default",
    "vdot.default", "grid_sampler.default", "index_put.default", "tensordot.default", "scatter_add.default",
    "cat.default", "stack.default",
]

REFUSED = {
    "binary_cross_entropy.default":
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Many models use a "
        "sigmoid layer right before the binary cross entropy layer. In this case, combine the two layers using "
        "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss.",
}


def _floating(value: Any) -> bool:
    """A device tensor that autocast may cast: float64 is left alone."""
    return (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
            and value.device.type == "tpu")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if _floating(value) and value.dtype != dtype else value
    if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
        return [_cast(item, dtype) for item in value]
    return value


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _in(choose: Callable[[tuple[Any, ...]], torch.dtype | None]) -> Callable[[Any], Callable[..., Any]]:
    """A rule that casts every floating device tensor to one dtype."""

    def rule(op: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            dtype = choose((*args, *kwargs.values()))
            with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
                if dtype is None:
                    return op(*args, **kwargs)
                return op(*(_cast(value, dtype) for value in args), **{k: _cast(v, dtype) for k, v in kwargs.items()})
        return run
    return rule


def _widest(values: tuple[Any, ...]) -> torch.dtype | None:
    found = [value.dtype for value in _flat(values) if _floating(value)]
    return None if not found else torch.float32 if torch.float32 in found else found[0]


def _by_dtype(op: Any) -> Callable[..., Any]:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        if _floating(args[0]) and kwargs.get("dtype") is None and (len(args) <= position or args[position] is None):
            kwargs["dtype"] = torch.float32
            args = args[:position]
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return op(*args, **kwargs)
    return run


def _refusal(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(REFUSED[f"{op._opname}.{op._overloadname}"])
    return run


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    rules: list[tuple[list[str], Callable[[Any], Callable[..., Any]]]] = [
        (LOW, _in(lambda values: torch.get_autocast_dtype("tpu"))),
        (FULL, _in(lambda values: torch.float32)),
        (FULL_BY_DTYPE, _by_dtype),
        (WIDEST, _in(_widest)),
        (list(REFUSED), _refusal),
    ]
    for names, rule in rules:
        for name in names:
            packet, overload = name.split(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if op is not None:  # lists span torch versions
                library.impl(packet if overload == "default" else name, rule(op), "AutocastPrivateUse1")
    return library


_library = _register()
