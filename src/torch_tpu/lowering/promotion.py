"""PyTorch's type promotion over JAX values.

Three ranks, as in torch.result_type: tensors with dimensions, 0-d tensors, Python numbers. A lower rank only matters
where its category (bool < integer < floating < complex) is higher.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from ..runtime import dtypes

_NUMBERS = (bool, int, float, complex)


def is_number(x: Any) -> bool:
    """A Python number, or one that is an argument of the program."""
    return isinstance(x, _NUMBERS) or (getattr(x, "ndim", None) == 0 and getattr(x, "weak_type", False))


def _category(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1


def _number_dtype(x: Any) -> torch.dtype:
    kind = np.dtype(x.dtype).kind if hasattr(x, "dtype") else {bool: "b", int: "i", float: "f"}.get(type(x), "c")
    if kind == "b":
        return torch.bool
    if kind in "iu":
        return torch.int64
    default = torch.get_default_dtype()
    if kind == "f":
        return default
    return torch.complex128 if default == torch.float64 else torch.complex64


def torch_dtype(x: Any) -> torch.dtype:
    return _number_dtype(x) if is_number(x) else dtypes.to_torch(x.dtype)


def result_dtype(*xs: Any) -> torch.dtype:
    """torch.result_type of JAX values and numbers."""
    ranks: list[Any] = [None, None, None]
    for x in xs:
        if x is None:
            continue
        rank = 2 if is_number(x) else (1 if x.ndim == 0 else 0)
        dtype = torch_dtype(x)
        held = ranks[rank]
        ranks[rank] = dtype if held is None else torch.promote_types(held, dtype)
    result = None
    for dtype in ranks:
        if dtype is None:
            continue
        if result is None:
            result = dtype
        elif _category(dtype) > _category(result):
            result = torch.promote_types(result, dtype) if _category(result) < 2 else _lift(result, dtype)
    assert result is not None
    return result


def _lift(result: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """A floating tensor with a complex of lower rank: complex of the tensor's own width."""
    return torch.promote_types(result, dtype) if not dtype.is_complex else {
        torch.float64: torch.complex128}.get(result, torch.complex64)


def cast(x: Any, dtype: Any) -> Any:
    """A JAX array of exactly this dtype (strong, not weak). Float to integer wraps as C does, as on the CPU."""
    want = dtypes.to_numpy(dtype) if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    if isinstance(x, _NUMBERS):
        return jnp.asarray(np.asarray(x).astype(want))
    if np.dtype(x.dtype) == want and not getattr(x, "weak_type", False):
        return x
    have = np.dtype(x.dtype)
    if want == np.bool_ and have != np.bool_:
        return x != 0
    if have.kind == "c" and want.kind != "c":
        x = x.real
        have = np.dtype(x.dtype)
    if want.kind in "iu" and want.itemsize < 8 and have.kind in "fV":
        # C converts through a wide integer and wraps; XLA would saturate.
        return x.astype(jnp.int64).astype(want)
    return x.astype(want)


def promote(*xs: Any) -> tuple[Any, ...]:
    """The values, all in their common PyTorch dtype."""
    dtype = result_dtype(*xs)
    return tuple(cast(x, dtype) for x in xs)


def promote_float(*xs: Any) -> tuple[Any, ...]:
    """As `promote`, with integers and bools becoming the default floating dtype."""
    dtype = result_dtype(*xs)
    if _category(dtype) < 2:
        dtype = torch.get_default_dtype()
    return tuple(cast(x, dtype) for x in xs)


def wide(x: Any) -> Any:
    """float32 for float16, bfloat16 and float8: the type in which PyTorch's CPU kernels compute them."""
    kind = np.dtype(x.dtype)
    narrow = kind == np.float16 or kind.kind == "V" or kind.name.startswith(("bfloat16", "float8"))
    return x.astype(jnp.float32) if narrow else x


def is_integral(x: Any) -> bool:
    """An integer or bool value."""
    return np.dtype(x.dtype).kind in "iub"
