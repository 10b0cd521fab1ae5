"""Ring attention of torch.distributed.tensor.experimental.context_parallel (torch 2.13) over the device's attention.

PyTorch's ring takes any operator that gives outputs and their log-sum-exp; it knows those of CUDA by name.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from . import on_import

_SEQUENCE = 2  # the dimension that PyTorch's ring goes over


def install() -> None:
    ring = "torch.distributed.tensor.experimental._context_parallel._attention"
    on_import.after("torch_tpu.eager.attention", lambda _: on_import.after(ring, _adapt))


def _plain(what: str, mask: Any, keep: Any) -> None:
    if mask is not None or keep is not None:
        raise NotImplementedError(f"context parallel {what} takes neither attn_mask nor dropout; use is_causal=True")


def _adapt(module: ModuleType) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def local(tensor: Any) -> torch.Tensor:
        if tensor.placements != (Shard(_SEQUENCE),):
            raise NotImplementedError(f"context parallel attention needs tensors divided along dimension {_SEQUENCE}, "
                                      f"got {tensor.placements}")
        return tensor._local_tensor

    def wrap(tensors: Any, mesh: Any) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(tensor, mesh, [Shard(_SEQUENCE)], run_check=False) for tensor in tensors)

    def forward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
        *tensors, mask, keep, _, is_causal, scale = args
        _plain("attention", mask, keep)
        mesh = tensors[0].device_mesh

        def run(query: Any, key: Any, value: Any, is_causal: bool, **_: Any) -> Any:
            return op(query, key, value, None, None, 0.0, is_causal, scale)

        return wrap(module._templated_ring_attention(mesh.get_group(), _SEQUENCE, run, *map(local, tensors),
                                                     is_causal=is_causal)[:2], mesh)

    def backward(op: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
        *tensors, mask, keep, _, is_causal, scale, _ = args
        _plain("attention", mask, keep)
        mesh = tensors[0].device_mesh
        grad, query, key, value, output, logsumexp = map(local, tensors)

        def run(grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool,
                **_: Any) -> Any:
            return op(grad_out.contiguous(), query, key, value, out, logsumexp, None, None, 0.0, is_causal, scale,
                      False)[:3]

        grads = module._templated_ring_attention_backward(
            mesh.get_group(), _SEQUENCE, run, grad, "grad_out", query, key, value, output, logsumexp, is_causal)
        return (*wrap(grads[:3], mesh), wrap([query.new_empty(0, 0, 0)], mesh)[0])

    module.custom_ops.update({torch.ops.tpu.sdpa.default: forward, torch.ops.tpu.sdpa_backward.default: backward})
