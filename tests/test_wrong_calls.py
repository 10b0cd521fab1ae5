"""Calls that PyTorch refuses: the same type of exception on the device as on the CPU, with a message."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from torch_tpu.eager import bookkeeping

h, i32, i64, f64, c64, b = torch.float16, torch.int32, torch.int64, torch.float64, torch.complex64, torch.bool


def f(d, *s, t=torch.float32):
    return (torch.arange(torch.Size(s).numel()) % 7 + 1).reshape(s).to(t).to(d)


# fmt: off
CALLS = {
    "linear_f32_f16": lambda d: F.linear(f(d, 2, 3), f(d, 4, 3, t=h)),
    "linear_bias_f16": lambda d: F.linear(f(d, 2, 3), f(d, 4, 3), f(d, 4, t=h)),
    "mm_f32_f64": lambda d: f(d, 2, 3) @ f(d, 3, 2, t=f64),
    "mm_f32_i64": lambda d: torch.mm(f(d, 2, 3), f(d, 3, 2, t=i64)),
    "bmm_f32_f16": lambda d: torch.bmm(f(d, 1, 2, 3), f(d, 1, 3, 2, t=h)),
    "mv_f32_f64": lambda d: torch.mv(f(d, 2, 3), f(d, 3, t=f64)),
    "dot_f32_f64": lambda d: torch.dot(f(d, 3), f(d, 3, t=f64)),
    "vdot_f32_c64": lambda d: torch.vdot(f(d, 3), f(d, 3, t=c64)),
    "addmm_self_f64": lambda d: torch.addmm(f(d, 2, 2, t=f64), f(d, 2, 3), f(d, 3, 2)),
    "addmm_mat_f64": lambda d: torch.addmm(f(d, 2, 2), f(d, 2, 3), f(d, 3, 2, t=f64)),
    "baddbmm": lambda d: torch.baddbmm(f(d, 1, 2, 2), f(d, 1, 2, 3), f(d, 1, 3, 2, t=f64)),
    "baddbmm_self": lambda d: torch.baddbmm(f(d, 1, 2, 2, t=f64), f(d, 1, 2, 3), f(d, 1, 3, 2)),
    "addmv": lambda d: torch.addmv(f(d, 2), f(d, 2, 3), f(d, 3, t=f64)),
    "addbmm": lambda d: torch.addbmm(f(d, 2, 2), f(d, 1, 2, 3), f(d, 1, 3, 2, t=f64)),
    "addr_dtype": lambda d: f(d, 2, 2, t=i64).addr_(f(d, 2), f(d, 2)),
    "matmul3d": lambda d: f(d, 2, 2, 3) @ f(d, 3, 2, t=f64),
    "conv1d": lambda d: F.conv1d(f(d, 1, 2, 5), f(d, 3, 2, 2, t=f64)),
    "conv2d_w": lambda d: F.conv2d(f(d, 1, 2, 5, 5), f(d, 3, 2, 2, 2, t=h)),
    "conv2d_b": lambda d: F.conv2d(f(d, 1, 2, 5, 5), f(d, 3, 2, 2, 2), f(d, 3, t=f64)),
    "conv2d_int_f": lambda d: F.conv2d(f(d, 1, 2, 5, 5, t=i64), f(d, 3, 2, 2, 2)),
    "conv_transpose2d": lambda d: F.conv_transpose2d(f(d, 1, 2, 5, 5), f(d, 2, 3, 2, 2, t=f64)),
    "conv2d_channels": lambda d: F.conv2d(f(d, 1, 3, 5, 5), f(d, 3, 2, 2, 2)),
    "conv2d_kernel": lambda d: F.conv2d(f(d, 1, 2, 1, 1), f(d, 3, 2, 2, 2)),
    "conv2d_groups": lambda d: F.conv2d(f(d, 1, 3, 5, 5), f(d, 4, 1, 2, 2), groups=2),
    "conv2d_stride0": lambda d: F.conv2d(f(d, 1, 2, 5, 5), f(d, 3, 2, 2, 2), stride=0),
    "conv2d_negpad": lambda d: F.conv2d(f(d, 1, 2, 5, 5), f(d, 3, 2, 2, 2), padding=-1),
    "conv2d_bias_shape": lambda d: F.conv2d(f(d, 1, 2, 5, 5), f(d, 3, 2, 2, 2), f(d, 2)),
    "cross_entropy_i32": lambda d: F.cross_entropy(f(d, 2, 3), torch.tensor([0, 1], dtype=i32, device=d)),
    "nll_i32": lambda d: F.nll_loss(f(d, 2, 3), torch.tensor([0, 1], dtype=i32, device=d)),
    "nll2d_i32": lambda d: F.nll_loss(f(d, 2, 3, 2, 2), torch.zeros(2, 2, 2, dtype=i32, device=d)),
    "nll_f32": lambda d: F.nll_loss(f(d, 2, 3), torch.tensor([0.0, 1], device=d)),
    "nll_weight": lambda d: F.nll_loss(f(d, 2, 3), torch.tensor([0, 1], device=d), weight=f(d, 2)),
    "nll_weight_dtype": lambda d: F.nll_loss(f(d, 2, 3), torch.tensor([0, 1], device=d), weight=f(d, 3, t=f64)),
    "cross_entropy_batch": lambda d: F.cross_entropy(f(d, 2, 3), torch.tensor([0, 1, 1], device=d)),
    "cross_entropy_probs_shape": lambda d: F.cross_entropy(f(d, 2, 3), f(d, 2, 4)),
    "complex_lt": lambda d: f(d, 3, t=c64) < 1,
    "complex_ge_t": lambda d: f(d, 3, t=c64) >= f(d, 3),
    "complex_max": lambda d: f(d, 3, t=c64).max(),
    "complex_min_dim": lambda d: f(d, 3, t=c64).min(0),
    "complex_sort": lambda d: f(d, 3, t=c64).sort(),
    "complex_clamp": lambda d: f(d, 3, t=c64).clamp(0, 1),
    "complex_floor": lambda d: f(d, 3, t=c64).floor(),
    "complex_argmax": lambda d: f(d, 3, t=c64).argmax(),
    "complex_maximum": lambda d: torch.maximum(f(d, 3, t=c64), f(d, 3, t=c64)),
    "complex_relu": lambda d: f(d, 3, t=c64).relu(),
    "complex_fmod": lambda d: f(d, 3, t=c64) % 2,
    "complex_floordiv": lambda d: f(d, 3, t=c64) // 2,
    "complex_topk": lambda d: f(d, 3, t=c64).topk(1),
    "complex_cummax": lambda d: f(d, 3, t=c64).cummax(0),
    "complex_trunc": lambda d: f(d, 3, t=c64).trunc(),
    "complex_atan2": lambda d: torch.atan2(f(d, 3, t=c64), f(d, 3, t=c64)),
    "complex_gelu": lambda d: F.gelu(f(d, 3, t=c64)),
    "complex_median": lambda d: f(d, 3, t=c64).median(),
    "index_float": lambda d: f(d, 3)[f(d, 2)],
    "index_f16": lambda d: f(d, 3)[f(d, 2, t=h)],
    "embedding_float": lambda d: F.embedding(f(d, 2), f(d, 4, 3)),
    "embedding_i8": lambda d: F.embedding(f(d, 2, t=torch.int8), f(d, 4, 3)),
    "gather_i32": lambda d: f(d, 3).gather(0, torch.zeros(2, dtype=i32, device=d)),
    "gather_float": lambda d: f(d, 3).gather(0, f(d, 2)),
    "gather_ndim": lambda d: f(d, 3, 3).gather(0, torch.zeros(2, dtype=i64, device=d)),
    "gather_big": lambda d: f(d, 3, 3).gather(0, torch.zeros(2, 4, dtype=i64, device=d)),
    "scatter_dtype": lambda d: f(d, 3).scatter(0, torch.zeros(2, dtype=i64, device=d), f(d, 2, t=f64)),
    "scatter_add_dtype": lambda d: f(d, 3).scatter_add(0, torch.zeros(2, dtype=i64, device=d), f(d, 2, t=f64)),
    "scatter_index_i32": lambda d: f(d, 3).scatter(0, torch.zeros(2, dtype=i32, device=d), 1.0),
    "scatter_reduce_name": lambda d: f(d, 3).scatter_reduce(0, torch.zeros(2, dtype=i64, device=d), f(d, 2), "nope"),
    "index_select_float": lambda d: f(d, 3).index_select(0, f(d, 2)),
    "index_select_2d": lambda d: f(d, 3).index_select(0, torch.zeros(2, 2, dtype=i64, device=d)),
    "index_select_dim": lambda d: f(d, 3).index_select(2, torch.zeros(2, dtype=i64, device=d)),
    "index_add_dtype": lambda d: f(d, 3).index_add(0, torch.zeros(2, dtype=i64, device=d), f(d, 2, t=f64)),
    "index_add_index": lambda d: f(d, 3).index_add(0, f(d, 2), f(d, 2)),
    "index_add_numel": lambda d: f(d, 3).index_add(0, torch.zeros(2, dtype=i64, device=d), f(d, 3)),
    "index_copy_dtype": lambda d: f(d, 3).index_copy(0, torch.zeros(2, dtype=i64, device=d), f(d, 2, t=f64)),
    "index_fill_float": lambda d: f(d, 3).index_fill(0, f(d, 2), 1.0),
    "index_put_dtype": lambda d: f(d, 3).index_put_((torch.zeros(2, dtype=i64, device=d),), f(d, 2, t=f64)),
    "take_float": lambda d: f(d, 3).take(f(d, 2)),
    "put_dtype": lambda d: f(d, 3).put(torch.zeros(2, dtype=i64, device=d), f(d, 2, t=f64)),
    "masked_select_f": lambda d: f(d, 3).masked_select(f(d, 3)),
    "masked_fill_int": lambda d: f(d, 3).masked_fill(f(d, 3, t=i64), 0.0),
    "masked_fill_2d": lambda d: f(d, 3).masked_fill_(f(d, 3) > 0, f(d, 2)),
    "masked_scatter_dtype": lambda d: f(d, 3).masked_scatter(f(d, 3) > 0, f(d, 3, t=f64)),
    "masked_scatter_mask": lambda d: f(d, 3).masked_scatter(f(d, 3), f(d, 3)),
    "where_cond": lambda d: torch.where(f(d, 3), f(d, 3), f(d, 3)),
    "mask_shape": lambda d: f(d, 3)[torch.ones(4, dtype=b, device=d)],
    "too_many_indices": lambda d: f(d, 3)[0, 0],
    "index_int_range": lambda d: f(d, 3)[5],
    "bool_neg": lambda d: -(f(d, 3) > 0),
    "bool_sub": lambda d: (f(d, 3) > 0) - (f(d, 3) > 0),
    "bool_rsub": lambda d: 1 - (f(d, 3) > 0),
    "bitwise_float": lambda d: f(d, 3) & f(d, 3),
    "bitwise_not_f": lambda d: ~f(d, 3),
    "shift_float": lambda d: torch.bitwise_left_shift(f(d, 3), 2),
    "gcd_float": lambda d: torch.gcd(f(d, 3), f(d, 3)),
    "iadd_int_float": lambda d: f(d, 3, t=i64).add_(1.5),
    "idiv_int": lambda d: f(d, 3, t=i64).div_(2),
    "int_mean": lambda d: f(d, 3, t=i64).mean(),
    "int_std": lambda d: f(d, 3, t=i64).std(),
    "int_norm": lambda d: f(d, 3, t=i64).norm(),
    "int_softmax": lambda d: f(d, 3, t=i64).softmax(0),
    "int_layer_norm": lambda d: F.layer_norm(f(d, 2, 3, t=i64), (3,)),
    "layer_norm_w_dtype": lambda d: F.layer_norm(f(d, 2, 3), (3,), f(d, 3, t=f64)),
    "layer_norm_shape": lambda d: F.layer_norm(f(d, 2, 3), (4,)),
    "batch_norm_dtype": lambda d: F.batch_norm(f(d, 2, 3), f(d, 3, t=f64), f(d, 3, t=f64)),
    "batch_norm_size": lambda d: F.batch_norm(f(d, 2, 3), f(d, 4), f(d, 4)),
    "batch_norm_one": lambda d: F.batch_norm(f(d, 1, 3), f(d, 3), f(d, 3), training=True),
    "group_norm": lambda d: F.group_norm(f(d, 2, 3), 2),
    "group_norm_w": lambda d: F.group_norm(f(d, 2, 4, 3), 2, f(d, 3)),
    "mse_shape": lambda d: F.mse_loss(f(d, 2, 3), f(d, 2, 4)),
    "lerp_dtype": lambda d: torch.lerp(f(d, 3), f(d, 3, t=f64), 0.5),
    "bce_target_shape": lambda d: F.binary_cross_entropy(f(d, 3).sigmoid(), f(d, 4).sigmoid()),
    "cat_dim": lambda d: torch.cat([f(d, 2, 3), f(d, 2, 3)], 5),
    "cat_shape": lambda d: torch.cat([f(d, 2, 3), f(d, 3, 4)]),
    "stack_shape": lambda d: torch.stack([f(d, 2, 3), f(d, 3, 4)]),
    "add_shape": lambda d: f(d, 2) + f(d, 3),
    "mm_shape": lambda d: f(d, 2, 3) @ f(d, 2, 3),
    "mm_dim": lambda d: torch.mm(f(d, 3), f(d, 3, 2)),
    "bmm_batch": lambda d: torch.bmm(f(d, 2, 2, 3), f(d, 3, 3, 2)),
    "view": lambda d: f(d, 2, 3).view(4),
    "view_stride": lambda d: f(d, 2, 3).t().view(6),
    "reshape": lambda d: f(d, 2, 3).reshape(-1, -1),
    "expand": lambda d: f(d, 2, 3).expand(3, 3),
    "permute": lambda d: f(d, 2, 3).permute(0, 0),
    "transpose": lambda d: f(d, 2, 3).transpose(0, 5),
    "squeeze": lambda d: f(d, 2, 3).squeeze(5),
    "unsqueeze": lambda d: f(d, 2, 3).unsqueeze(5),
    "sum_dim": lambda d: f(d, 2, 3).sum(5),
    "sum_dup": lambda d: f(d, 2, 3).sum((0, 0)),
    "softmax_dim": lambda d: f(d, 2, 3).softmax(5),
    "max_empty": lambda d: f(d, 0).max(),
    "max_empty_dim": lambda d: f(d, 2, 0).max(1),
    "argmax_empty": lambda d: f(d, 0).argmax(),
    "argmax_empty_dim": lambda d: f(d, 2, 0).argmax(1),
    "min_empty": lambda d: f(d, 0).min(),
    "amax_empty": lambda d: f(d, 0).amax(),
    "aminmax_empty": lambda d: f(d, 0).aminmax(),
    "median_empty_dim": lambda d: f(d, 2, 0).median(1),
    "mode_empty": lambda d: f(d, 2, 0).mode(1),
    "kthvalue": lambda d: f(d, 3).kthvalue(5),
    "kthvalue0": lambda d: f(d, 3).kthvalue(0),
    "topk": lambda d: f(d, 3).topk(5),
    "quantile": lambda d: f(d, 3).quantile(2.0),
    "quantile_dtype": lambda d: f(d, 3).quantile(torch.tensor(0.5, dtype=f64, device=d)),
    "chunk": lambda d: f(d, 3).chunk(0),
    "split": lambda d: f(d, 3).split([1, 1]),
    "narrow": lambda d: f(d, 3).narrow(0, 2, 3),
    "select": lambda d: f(d, 3).select(0, 4),
    "unfold": lambda d: f(d, 3).unfold(0, 5, 1),
    "flip": lambda d: f(d, 3).flip(0, 0),
    "roll": lambda d: f(d, 3).roll(1, 4),
    "diag": lambda d: torch.diag(f(d, 2, 2, 2)),
    "tril": lambda d: torch.tril(f(d, 2)),
    "trace": lambda d: torch.trace(f(d, 2)),
    "cumsum_dim": lambda d: f(d, 2).cumsum(3),
    "cross_dim": lambda d: torch.linalg.cross(f(d, 4), f(d, 4)),
    "inverse": lambda d: torch.linalg.inv(f(d, 2, 3)),
    "inverse_sing": lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
    "inverse_int": lambda d: torch.linalg.inv(f(d, 2, 2, t=i64)),
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(2, device=d)),
    "solve": lambda d: torch.linalg.solve(torch.zeros(2, 2, device=d), f(d, 2)),
    "qr_mode": lambda d: torch.linalg.qr(f(d, 2, 2), "nope"),
    "svd_1d": lambda d: torch.linalg.svd(f(d, 2)),
    "det_rect": lambda d: torch.linalg.det(f(d, 2, 3)),
    "max_pool": lambda d: F.max_pool2d(f(d, 1, 1, 2, 2), 3),
    "max_pool_pad": lambda d: F.max_pool2d(f(d, 1, 1, 4, 4), 2, padding=2),
    "avg_pool_k0": lambda d: F.avg_pool2d(f(d, 1, 1, 4, 4), 0),
    "avg_pool_ndim": lambda d: F.avg_pool2d(f(d, 4), 2),
    "adaptive_ndim": lambda d: F.adaptive_avg_pool2d(f(d, 4), 2),
    "pad_neg": lambda d: F.pad(f(d, 1, 3), (-2, -2)),
    "pad_reflect": lambda d: F.pad(f(d, 1, 3), (3, 3), mode="reflect"),
    "pad_odd": lambda d: F.pad(f(d, 1, 3), (1,)),
    "interpolate": lambda d: F.interpolate(f(d, 1, 1, 4), size=0),
    "grid_sample": lambda d: F.grid_sample(f(d, 1, 1, 4, 4), f(d, 2, 2, 2, 2)),
    "grid_sample_dtype": lambda d: F.grid_sample(f(d, 1, 1, 4, 4), f(d, 1, 2, 2, 2, t=f64)),
    "fold": lambda d: F.fold(f(d, 1, 5, 4), (4, 4), 2),
    "pixel_shuffle": lambda d: F.pixel_shuffle(f(d, 1, 3, 2, 2), 2),
    "one_hot_float": lambda d: F.one_hot(f(d, 3)),
    "one_hot_i32": lambda d: F.one_hot(f(d, 3, t=i32)),
    "bincount_neg": lambda d: torch.bincount(torch.tensor([-1], device=d)),
    "bincount_f": lambda d: torch.bincount(f(d, 2)),
    "histc": lambda d: torch.histc(f(d, 3), bins=0),
    "bucketize": lambda d: torch.bucketize(f(d, 3), f(d, 2, 2)),
    "searchsorted": lambda d: torch.searchsorted(f(d, 2, 3), f(d, 3, 2)),
    "arange": lambda d: torch.arange(0, 5, -1, device=d),
    "arange0": lambda d: torch.arange(0, 5, 0, device=d),
    "linspace": lambda d: torch.linspace(0, 1, -1, device=d),
    "zeros_neg": lambda d: torch.zeros(-1, device=d),
    "full_noval": lambda d: torch.full((2,), "a", device=d),
    "eye_neg": lambda d: torch.eye(-1, device=d),
    "item": lambda d: f(d, 3).item(),
    "bool": lambda d: bool(f(d, 3)),
    "int_empty": lambda d: int(f(d, 0)),
    "out_dtype": lambda d: torch.add(f(d, 3), f(d, 3), out=f(d, 3, t=i64)),
    "out_bool": lambda d: torch.sqrt(f(d, 3), out=f(d, 3, t=i64)),
    "overlap": lambda d: f(d, 1).expand(3).add_(1),
    "copy_shape": lambda d: f(d, 3).copy_(f(d, 4)),
    "resize_grad": lambda d: f(d, 3).requires_grad_().resize_(4),
    "leaf_inplace": lambda d: f(d, 3).requires_grad_().add_(1),
    "backward_noscalar": lambda d: (f(d, 3).requires_grad_() * 2).backward(),
    "backward_twice": lambda d: (lambda l: (l.backward(), l.backward()))((f(d, 3).requires_grad_() ** 2).sum()),
    "inplace_saved":
        lambda d: (lambda a: (lambda y: (y.add_(1), y.sum().backward()))(a.exp()))(f(d, 3).requires_grad_()),
    "dropout_p": lambda d: F.dropout(f(d, 3), 1.5),
    "dropout_p_aten": lambda d: torch.native_dropout(f(d, 3), 1.5, True),
    "normal_std": lambda d: torch.normal(0.0, -1.0, (2,), device=d),
    "normal_std_": lambda d: f(d, 3).normal_(0, -1),
    "normal_int": lambda d: f(d, 3, t=i64).normal_(),
    "uniform_order": lambda d: f(d, 3).uniform_(2, 1),
    "uniform_int": lambda d: f(d, 3, t=i64).uniform_(0, 1),
    "exponential_neg": lambda d: f(d, 3).exponential_(-1),
    "geometric": lambda d: f(d, 3).geometric_(2),
    "log_normal": lambda d: f(d, 3).log_normal_(0, -1),
    "cauchy": lambda d: f(d, 3).cauchy_(0, -1),
    "bernoulli_p": lambda d: f(d, 3).bernoulli_(1.5),
    "bernoulli_int": lambda d: torch.bernoulli(f(d, 3, t=i64)),
    "random_order": lambda d: f(d, 3).random_(5, 1),
    "random_range": lambda d: f(d, 3, t=torch.int8).random_(0, 1000),
    "randint_order": lambda d: torch.randint(5, 1, (2,), device=d),
    "randint_range": lambda d: torch.randint(0, 1000, (2,), device=d, dtype=torch.int8),
    "randn_int": lambda d: torch.randn(2, device=d, dtype=i64),
    "rand_int": lambda d: torch.rand(2, device=d, dtype=i64),
    "randperm_neg": lambda d: torch.randperm(-1, device=d),
    "randperm_small": lambda d: torch.randperm(300, device=d, dtype=torch.uint8),
    "multinomial_int": lambda d: torch.multinomial(f(d, 3, t=i64), 1),
    "multinomial_too_many": lambda d: torch.multinomial(f(d, 3), 5),
    "multinomial_0": lambda d: torch.multinomial(f(d, 3), 0),
    "multinomial_3d": lambda d: torch.multinomial(f(d, 2, 2, 2), 1),
    "poisson_int": lambda d: torch.poisson(f(d, 3, t=i64)),
    "sdpa_dtype": lambda d: F.scaled_dot_product_attention(f(d, 1, 2, 3), f(d, 1, 2, 3, t=h), f(d, 1, 2, 3)),
    "sdpa_shape": lambda d: F.scaled_dot_product_attention(f(d, 1, 2, 3), f(d, 1, 2, 4), f(d, 1, 2, 3)),
    "sdpa_mask_causal":
        lambda d: F.scaled_dot_product_attention(f(d, 1, 2, 3), f(d, 1, 2, 3), f(d, 1, 2, 3),
                                                 attn_mask=f(d, 2, 2), is_causal=True),
    "sdpa_mask_int":
        lambda d: F.scaled_dot_product_attention(f(d, 1, 2, 3), f(d, 1, 2, 3), f(d, 1, 2, 3),
                                                 attn_mask=f(d, 2, 2, t=i64)),
    "lstm_dtype": lambda d: nn.LSTM(3, 4).to(d)(f(d, 2, 1, 3, t=f64)),
    "lstm_size": lambda d: nn.LSTM(3, 4).to(d)(f(d, 2, 1, 5)),
    "gru_hidden": lambda d: nn.GRU(3, 4).to(d)(f(d, 2, 1, 3), f(d, 1, 2, 4)),
    "linear_mod_shape": lambda d: nn.Linear(3, 4).to(d)(f(d, 2, 5)),
    "linear_mod_int": lambda d: nn.Linear(3, 4).to(d)(f(d, 2, 3, t=i64)),
    "embedding_bag_f": lambda d: F.embedding_bag(f(d, 1, 2), f(d, 4, 3)),
    "fft_n0": lambda d: torch.fft.fft(f(d, 3), n=0),
    "fft_norm": lambda d: torch.fft.fft(f(d, 3), norm="nope"),
    "rfft_c": lambda d: torch.fft.rfft(f(d, 3, t=c64)),
    "einsum": lambda d: torch.einsum("ij,jk->ik", f(d, 2, 3), f(d, 2, 3)),
    "tensordot": lambda d: torch.tensordot(f(d, 2, 3), f(d, 2, 3), dims=1),
    "vander": lambda d: torch.vander(f(d, 2, 2)),
    "cdist": lambda d: torch.cdist(f(d, 2, 3), f(d, 2, 4)),
    "renorm": lambda d: f(d, 2, 3).renorm(-1, 0, 1),
    "polygamma": lambda d: torch.polygamma(-1, f(d, 2)),
    "clamp_none": lambda d: f(d, 2).clamp(),
    "hypot_int": lambda d: torch.hypot(f(d, 2, t=i64), f(d, 2, t=i64)),
    "repeat": lambda d: f(d, 2, 2).repeat(2),
    "repeat_interleave": lambda d: f(d, 3).repeat_interleave(torch.tensor([1, 2], device=d)),
    "repeat_interleave_neg": lambda d: f(d, 3).repeat_interleave(torch.tensor([1, 2, -1], device=d)),
    "ctc": lambda d: F.ctc_loss(f(d, 5, 2, 3), f(d, 2, 2), [5, 5], [2, 2]),
    "generator": lambda d: torch.rand(2, device=d, generator=torch.Generator("cpu" if d == "tpu" else "tpu")),
}

# Refused for what the tensors hold: on the device in debug mode, and where the host knows the values.
VALUES = {
    "floordiv0": lambda d: f(d, 3, t=i64) // 0,
    "mod0": lambda d: f(d, 3, t=i64) % 0,
    "fmod0": lambda d: f(d, 3, t=i64).fmod(0),
    "floordiv0_": lambda d: f(d, 3, t=i32).floor_divide_(0),
    "div_trunc0": lambda d: torch.div(f(d, 3, t=i64), 0, rounding_mode="trunc"),
    "pow_neg": lambda d: f(d, 3, t=i64) ** (-1),
    "pow_neg_": lambda d: f(d, 3, t=i64).pow_(-1),
    "pow_scalar": lambda d: torch.pow(2, torch.tensor([-1], device=d)),
    "floordiv_t": lambda d: f(d, 3, t=i64) // torch.tensor([1, 0, 1], device=d),
    "mod_t": lambda d: f(d, 3, t=i64) % torch.tensor([1, 0, 1], device=d),
    "rdiv": lambda d: 5 // torch.tensor([1, 0, 1], device=d),
    "pow_t": lambda d: f(d, 3, t=i64) ** torch.tensor([1, -1, 1], device=d),
    "multinomial_neg": lambda d: torch.multinomial(torch.tensor([-1.0, 2], device=d), 1),
    "multinomial_0": lambda d: torch.multinomial(torch.tensor([0.0, 0], device=d), 1),
    "multinomial_nan": lambda d: torch.multinomial(torch.tensor([0.0, float("nan")], device=d), 1),
    "multinomial_few": lambda d: torch.multinomial(torch.tensor([0.0, 1.0, 0], device=d), 2),
    "bernoulli": lambda d: torch.bernoulli(torch.tensor([1.5], device=d)),
    "bernoulli_t": lambda d: f(d, 1).bernoulli_(torch.tensor([1.5], device=d)),
    "poisson": lambda d: torch.poisson(torch.tensor([-1.5], device=d)),
    "binomial": lambda d: torch.binomial(torch.tensor([-1.5], device=d), torch.tensor([0.5], device=d)),
    "normal_std": lambda d: torch.normal(torch.tensor([1.0], device=d), torch.tensor([-0.5], device=d)),
    "bce": lambda d: F.binary_cross_entropy(torch.tensor([1.5], device=d), torch.tensor([0.5], device=d)),
    "bce_t": lambda d: F.binary_cross_entropy(torch.tensor([0.5], device=d), torch.tensor([1.5], device=d)),
    "masked_scatter": lambda d: f(d, 3).masked_scatter(f(d, 3) > 0, f(d, 2)),
    "one_hot_neg": lambda d: F.one_hot(torch.tensor([-1], device=d)),
    "one_hot_big": lambda d: F.one_hot(torch.tensor([5], device=d), 3),
    "one_hot_empty": lambda d: F.one_hot(torch.tensor([], dtype=i64, device=d)),
    "gather": lambda d: f(d, 3).gather(0, torch.tensor([5], device=d)),
    "gather_neg": lambda d: f(d, 3).gather(0, torch.tensor([-1], device=d)),
    "index": lambda d: f(d, 3)[torch.tensor([5], device=d)],
    "index_put": lambda d: f(d, 3).index_put_((torch.tensor([5], device=d),), f(d, 1)),
    "setitem": lambda d: f(d, 3).__setitem__(torch.tensor([5], device=d), 0.0),
    "index_select": lambda d: f(d, 3).index_select(0, torch.tensor([5], device=d)),
    "embedding": lambda d: F.embedding(torch.tensor([5], device=d), f(d, 3, 2)),
    "embedding_bag": lambda d: F.embedding_bag(torch.tensor([[5]], device=d), f(d, 3, 2)),
    "cross_entropy": lambda d: F.cross_entropy(f(d, 2, 3), torch.tensor([5, 1], device=d)),
    "nll2d": lambda d: F.nll_loss(f(d, 1, 3, 1, 1), torch.tensor([[[5]]], device=d)),
    "multi_margin": lambda d: F.multi_margin_loss(f(d, 2, 3), torch.tensor([5, 1], device=d)),
    "multilabel_margin": lambda d: F.multilabel_margin_loss(f(d, 1, 3), torch.tensor([[5, 1, -1]], device=d)),
    "scatter": lambda d: f(d, 3).scatter(0, torch.tensor([5], device=d), 1.0),
    "scatter_add": lambda d: f(d, 3).scatter_add(0, torch.tensor([5], device=d), f(d, 1)),
    "scatter_reduce": lambda d: f(d, 3).scatter_reduce(0, torch.tensor([5], device=d), f(d, 1), "sum"),
    "index_add": lambda d: f(d, 3).index_add(0, torch.tensor([5], device=d), f(d, 1)),
    "index_copy": lambda d: f(d, 3).index_copy(0, torch.tensor([5], device=d), f(d, 1)),
    "index_fill": lambda d: f(d, 3).index_fill(0, torch.tensor([5], device=d), 1.0),
    "index_reduce": lambda d: f(d, 3).index_reduce(0, torch.tensor([5], device=d), f(d, 1), "prod"),
    "take": lambda d: f(d, 3).take(torch.tensor([5], device=d)),
    "put": lambda d: f(d, 3).put(torch.tensor([5], device=d), f(d, 1)),
    "take_along": lambda d: torch.take_along_dim(f(d, 3), torch.tensor([5], device=d), 0),
    "max_unpool": lambda d: F.max_unpool2d(f(d, 1, 1, 1, 1), torch.tensor([[[[50]]]], device=d), 2),
    "assert": lambda d: torch._assert_async(torch.tensor(0, device=d)),
    "assert_msg": lambda d: torch._assert_async(torch.tensor(0, device=d), "must hold"),
    "quantile_t": lambda d: f(d, 3).quantile(torch.tensor([1.5], device=d)),
    "lu_unpack": lambda d: torch.lu_unpack(f(d, 2, 2), torch.tensor([5, 1], dtype=i32, device=d)),
    "ctc":
        lambda d: F.ctc_loss(f(d, 5, 1, 3).log_softmax(2), torch.tensor([[7, 8]], device=d),
                             torch.tensor([5], device=d), torch.tensor([2], device=d)),
    "repeat": lambda d: torch.repeat_interleave(torch.tensor([-1], device=d)),
    "segment": lambda d: torch.segment_reduce(f(d, 3), "sum", lengths=torch.tensor([5], device=d)),
    "index_negative": lambda d: f(d, 3, 3)[:, torch.tensor([-4], device=d)],
}



def outcome(call, device):
    try:
        result = call(device)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                leaf.cpu()
    except Exception as error:
        return type(error), str(error)
    return None, ""


def same(call):
    wanted, said = outcome(call, "cpu")
    got, message = outcome(call, "tpu")
    assert got is wanted, f"CPU: {wanted} {said[:200]}\ntpu: {got} {message[:200]}"
    assert wanted is None or message.strip()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_wrong_calls(name):
    before = bookkeeping.set(False)
    try:
        same(CALLS[name])
    finally:
        bookkeeping.set(before)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.filterwarnings("ignore")
def test_wrong_values_in_debug_mode(name):
    before = bookkeeping.set(False)
    try:
        with torch.tpu.debug.mode():
            same(VALUES[name])
    finally:
        bookkeeping.set(before)


HOST = ["floordiv0", "mod0", "fmod0", "floordiv0_", "div_trunc0", "pow_neg", "pow_neg_", "one_hot_neg", "assert",
        "assert_msg"]


@pytest.mark.parametrize("name", HOST)
def test_values_the_host_needs_no_look_for(name):
    before = bookkeeping.set(False)
    try:
        assert outcome(VALUES[name], "tpu")[0] is outcome(VALUES[name], "cpu")[0] is not None
    finally:
        bookkeeping.set(before)


KNOWN = ["gather", "gather_neg", "index", "index_put", "setitem", "index_select", "embedding", "embedding_bag",
         "cross_entropy", "nll2d", "multi_margin", "scatter", "scatter_add", "scatter_reduce", "index_add",
         "index_copy", "index_fill", "index_reduce", "take", "put", "one_hot_big", "max_unpool"]


@pytest.mark.parametrize("name", KNOWN)
def test_indices_that_came_from_the_host(name):
    assert outcome(VALUES[name], "tpu")[0] is outcome(VALUES[name], "cpu")[0] is not None


def test_a_refused_call_leaves_no_trace():
    x = torch.ones(3, device="tpu", dtype=i64)
    assert (x // 2).tolist() == [0, 0, 0] and (x % 2).tolist() == [1, 1, 1] and (x**2).tolist() == [1, 1, 1]
    for wrong in (lambda: x // 0, lambda: x % 0, lambda: x**-1):
        with pytest.raises(RuntimeError):
            wrong()
    y = torch.ones(3, device="tpu")
    assert (y / 0).isinf().all() and (y // 0).isinf().all() and (y % 0).isnan().all() and (y**-1).tolist() == [1, 1, 1]
    torch.manual_seed(0)
    want = torch.rand(2, device="tpu")
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=r"p to be in \[0, 1\]"):
        y.bernoulli_(1.5)
    assert torch.equal(torch.rand(2, device="tpu"), want)
