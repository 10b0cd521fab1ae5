"""What lowerings depend on besides their arguments: PyTorch's global numeric settings, and the mesh. Part of every
cache key."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jax import lax

from ..runtime import config, partition, platform

PRECISIONS = {"highest": lax.Precision.HIGHEST, "high": lax.Precision.HIGH, "medium": lax.Precision.DEFAULT}


def key() -> tuple[object, ...]:
    """The settings as a hashable value."""
    return torch.get_float32_matmul_precision(), torch.get_default_dtype(), matmul_rows(), partition.epoch


_target = ""
_divided = False


@contextmanager
def targeting(platform_name: str, divided: bool = False) -> Iterator[None]:
    """Programs traced inside are for this platform, whatever runs the device of this process.

    Args:
        divided: XLA will divide them among several chips.
    """
    global _target, _divided
    before, (_target, _divided) = (_target, _divided), (platform_name, divided)
    try:
        yield
    finally:
        _target, _divided = before


def divided() -> bool:
    """Whether XLA divides programs among several chips: it cannot divide Pallas kernels."""
    return _divided or partition.current is not None


def platform_name() -> str:
    """The platform that programs are for."""
    return _target or platform.choose().name


# XLA:TPU keeps 32 MiB of scores on the chip, and 128 MiB not (v5e and v6e, libtpu 0.0.42.1; docs/kernels.md).
_FLASH_BYTES = 64 << 20


@functools.cache
def flash_bytes() -> float:
    """Programs for TPUs: the least size of attention scores that are not to go through memory (flash.py).
    TORCH_TPU_FLASH_ATTENTION says otherwise."""
    given = config.FLASH_ATTENTION.size_auto_or_off()
    return _FLASH_BYTES if given is None else given


def matmul_rows() -> int:
    """The least number of rows of a product of narrow floats; one with fewer is padded. XLA:TPU computes a single row
    on the vector unit, and by its own estimate eight, which go to the matrix unit, take less than half the cycles of a
    decode step (docs/performance.md). TORCH_TPU_MATMUL_ROWS says otherwise."""
    return 1 if _many_rows else _matmul_rows(platform_name())


@functools.cache
def _matmul_rows(platform_name: str) -> int:
    given = config.MATMUL_ROWS.positive_or_auto()
    return given if given is not None else 8 if platform_name == "tpu" else 1


_MANY_ROWS = 128
_in_program = _many_rows = False


@contextmanager
def program() -> Iterator[None]:
    """What is lowered inside is one program. After a product of many rows its few products of few rows are left as they
    are: for the last token of a prefill, XLA:TPU would hold the output layer's whole weight in VMEM, and on v6e the
    attention's scores would no longer fit there."""
    global _in_program, _many_rows
    before, (_in_program, _many_rows) = (_in_program, _many_rows), (True, False)
    try:
        yield
    finally:
        _in_program, _many_rows = before


def note_rows(rows: int) -> None:
    """A product of so many rows is lowered."""
    global _many_rows
    _many_rows |= _in_program and rows >= _MANY_ROWS


_forced = ""


class Consulted:
    """How often the precision was asked for: whether a program depends on it."""

    count = 0


def precision() -> lax.Precision:
    """Precision of float32 matmul and convolution, as set by torch.set_float32_matmul_precision."""
    Consulted.count += 1
    return PRECISIONS[_forced or torch.get_float32_matmul_precision()]


@contextmanager
def forced_precision(name: str) -> Iterator[None]:
    """Programs traced inside have this precision whatever the global setting; "" leaves it."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
