"""Sparse and quantized tensors, which XLA does not have: one clear error instead of PyTorch's list of backends."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

_SPARSE = "sparse tensors are not supported on tpu; keep them on the CPU, or convert with .to_dense()"
_INSTEAD = {
    "SparsePrivateUse1": _SPARSE,
    "SparseCsrPrivateUse1": _SPARSE,
    "QuantizedPrivateUse1": "PyTorch's quantized tensors are not supported on tpu (XLA has no such type); convert with "
                            ".dequantize(), or keep int8 values and their scales as two tensors",
}
_libraries: list[torch.library.Library] = []


def _refuse(key: str) -> Any:
    def kernel(op: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{op}: {_INSTEAD[key]}")

    return kernel


for _key in _INSTEAD:
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_refuse(_key), _key)
    _libraries.append(_library)
