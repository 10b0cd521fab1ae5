"""A pipeline on the CPU and the same one without a device argument, on the same input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import pipeline

TOLERANCE = 1e-3


def compare(task: str, model: torch.nn.Module, call: Callable[[Any], Any], **parts: Any) -> Any:
    """The result of the pipeline that chose its device itself, after comparing it with the CPU's.

    Args:
        task: as in `pipeline(task)`.
        model: copied for each device.
        call: uses a pipeline; what it returns is compared leaf by leaf.
        parts: tokenizer, image_processor, ...
    """
    want = call(pipeline(task, model=copy.deepcopy(model).eval(), device="cpu", **parts))
    made = pipeline(task, model=model.eval(), **parts)
    assert made.device == torch.device("tpu", 0)
    assert {parameter.device.type for parameter in made.model.parameters()} == {"tpu"}
    got = call(made)
    wanted, gotten = [*_leaves(want)], [*_leaves(got)]
    assert len(wanted) == len(gotten) > 0
    for a, b in zip(gotten, wanted):
        assert a == (pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE) if isinstance(b, float) else b)
    return got


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, torch.Tensor):
        yield from value.detach().float().cpu().flatten().tolist()
    elif isinstance(value, np.ndarray) or hasattr(value, "getpixel"):
        yield from np.asarray(value).astype(float).flatten().tolist()
    else:
        yield value.item() if isinstance(value, np.generic) else value
