"""torch dtype <-> NumPy dtype (ml_dtypes for the narrow floats), as JAX uses them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

_PAIRS: tuple[tuple[str, object], ...] = (
    ("bool", np.bool_), ("uint8", np.uint8), ("uint16", np.uint16), ("uint32", np.uint32), ("uint64", np.uint64),
    ("int8", np.int8), ("int16", np.int16), ("int32", np.int32), ("int64", np.int64),
    ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32), ("float64", np.float64),
    ("complex64", np.complex64), ("complex128", np.complex128),
    ("float8_e4m3fn", ml_dtypes.float8_e4m3fn), ("float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
    ("float8_e5m2", ml_dtypes.float8_e5m2), ("float8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz),
    ("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu),
)
_TO_NUMPY: dict[torch.dtype, np.dtype] = {getattr(torch, name): np.dtype(kind) for name, kind in _PAIRS}  # type: ignore[call-overload]
_TO_TORCH: dict[np.dtype, torch.dtype] = {numpy: dtype for dtype, numpy in _TO_NUMPY.items()}


def to_numpy(dtype: torch.dtype) -> np.dtype:
    """Raises TypeError for a dtype that XLA does not have (complex32, quantized, sub-byte)."""
    try:
        return _TO_NUMPY[dtype]
    except KeyError:
        raise TypeError(
            f"{dtype} is not supported on tpu (XLA has no such type); convert the tensor on the CPU first, for "
            f"example to {'torch.complex64' if dtype == torch.complex32 else 'torch.float32 or torch.int8'}") from None


def to_torch(dtype: np.dtype) -> torch.dtype:
    try:
        return _TO_TORCH[np.dtype(dtype)]
    except KeyError:
        raise TypeError(f"a JAX array of dtype {dtype} has no PyTorch counterpart") from None


def supported() -> list[torch.dtype]:
    return list(_TO_NUMPY)
