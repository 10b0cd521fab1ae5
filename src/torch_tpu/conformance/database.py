"""PyTorch's OpInfo database, and what has to be known about single operators to compare them fairly."""

from __future__ import annotations

import re
from typing import Any


def _names(pattern: str) -> re.Pattern[str]:
    return re.compile("(?:" + re.sub(r"\s+", "", pattern) + r")$")


# Results that are random or uninitialised: shape, dtype and device are compared.
RANDOM = _names(r"""empty\w*|new_empty\w*|rand\w*|bernoulli|multinomial|normal|uniform|cauchy|exponential|geometric|
  log_normal|nn\.functional\.(\w*dropout\w*|rrelu|fractional_max_pool\w*)|(torch\.)?pca_lowrank|svd_lowrank""")
# Which of several equal values an index names is not defined: the values are compared, of indices the shape.
TIES = _names(r"m?sort|argsort|topk|kthvalue|mode|(nan)?median|masked\.(nan)?median")
# Results defined up to a sign or phase: OpInfo's own reduction to what is unique is compared.
GAUGE = _names(r"(linalg\.)?(svd|eigh?|qr|householder_product|lobpcg)|geqrf")
# Operators whose tensor arguments PyTorch wants on the CPU, on every device (all but the first).
HOST_ARGUMENTS = _names(r"tensor_split")
# Operators that write nothing which could be compared when `out=` is random.
NO_OUT = RANDOM

# (operator, dtype, what the failure says) -> why it differs. A failure listed here is in the report, with the reason;
# any other makes the command fail.
KNOWN: list[tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str], str]] = [
    (_names(r"to_sparse|sparse\..*"), _names(".*"), re.compile("(?i)sparse|no result of the device"),
     "sparse tensors are not supported on tpu: the error says to keep them on the CPU or to use .to_dense()"),
    (_names(r"nn\.functional\.interpolate\.bi\w+|_upsample_bi\w+_aa"), _names("uint8"), re.compile("not equal"),
     "rounding: weights are float32 here, fixed-point integers of 8 to 16 bits on the CPU; single elements differ by "
     "1, bicubic ones by 2"),
    (_names("logcumsumexp"), _names("complex64"), re.compile("gradient"),
     "ill-conditioned: the CPU's own complex64 gradient is 0.0014 from the complex128 one, this 0.0035 (values up to "
     "5)"),
]


def known(operator: str, dtype: str, text: str) -> str | None:
    """The reason of a failure, when it is a known one."""
    for operators, dtypes, message, reason in KNOWN:
        if operators.match(operator) and dtypes.match(dtype) and message.search(text):
            return reason
    return None


def operators() -> list[Any]:
    """All OpInfos of the installed PyTorch.

    Raises:
        ImportError: PyTorch's test modules need `expecttest`, which is not installed with torch.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        raise ImportError(f"PyTorch's operator tests cannot be imported ({error}); "
                          "pip install expecttest numpy") from error
    return op_db


DTYPES = ("float32", "bfloat16", "int64", "bool", "float64", "float16", "complex64", "int32", "uint8")
FIRST = DTYPES[:4]
GRADIENT_DTYPES = ("float32", "bfloat16", "float64", "complex64")
