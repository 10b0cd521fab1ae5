"""The forward of a Transformers model over a static cache, captured as one program for each shape of its inputs.

Dynamo takes seconds to trace a deep decoder, and again in every process. A capture (compile/step.py) runs the model's
Python code once on tensors without data, in a tenth of that, and its checks cost less at each token. It is used where
that code has no effect but on tensors: a static cache of plain layers, no hooks of the user, tensors and plain values
as inputs. Everything else goes through torch.compile, as does a model whose code a capture refuses (said once).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..compile import cache_layout
from ..compile.step import CompiledStep
from ..runtime import errors
from ..tensor import buffer

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.Tensor)


class Forward:
    """Calls the model; `otherwise` is what to call where a capture does not serve.

    Attributes:
        refused: why a capture was refused, once it was.
    """

    def __init__(self, model: Any, name: str, otherwise: Callable[..., Any]) -> None:
        self.model = model
        self.otherwise = otherwise
        self.refused: str | None = None
        self._step = CompiledStep(self._run, f"{type(model).__name__}.{name}", {}, True, many=True)
        self._cache: Any = None
        self._tensors: list[torch.Tensor] = []
        self._made: tuple[type, tuple[str, ...]] = (dict, ())
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        cache = inputs.pop("cache", None)
        if args or self.refused or not _suits(self.model, cache, inputs):
            return self.otherwise(*args, **inputs, cache=cache)
        if any(now != before for now, before in self._settings):  # the attention's implementation, for one
            self._step.reset()
            self._settings = []
        if not self._settings:
            self._settings = [(vars(part), dict(vars(part))) for part in _configs(self.model.config)]
        if cache is not self._cache:
            tensors = [value for layer in cache.layers for value in vars(layer).values()
                       if isinstance(value, torch.Tensor)]
            cache_layout.drop_leading_ones(buffer.of(layer) for layer in tensors if layer.dim() == 4)
            self._cache, self._tensors = cache, tensors
        try:
            outputs = self._step(inputs, self._tensors)
        except errors.CaptureError as error:
            self.refused = str(error)
            warnings.warn(f"torch_tpu: {type(self.model).__name__} goes through torch.compile, since its code cannot "
                          f"be captured: {error}", RuntimeWarning, stacklevel=2)
            return self.otherwise(**inputs, cache=cache)
        kind, names = self._made
        return kind(**outputs, **dict.fromkeys(names, cache))

    def _run(self, inputs: dict[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
        outputs = self.model(**inputs, cache=self._cache)
        if not isinstance(outputs, dict):
            raise errors.CaptureError(f"the model returns a {type(outputs).__name__}, not a ModelOutput")
        self._made = type(outputs), tuple(name for name, value in outputs.items() if value is self._cache)
        return {name: value for name, value in outputs.items() if value is not self._cache}


def _configs(config: Any) -> list[Any]:
    """A model's configuration and those inside it."""
    return [config, *(part for value in vars(config).values() if hasattr(value, "to_diff_dict")
                      for part in _configs(value))]


def _suits(model: Any, cache: Any, inputs: dict[str, Any]) -> bool:
    """Whether the model's Python code, for this call, does nothing but compute on tensors."""
    from transformers.cache_utils import StaticLayer

    if cache is None or not all(type(layer) is StaticLayer and layer.is_initialized for layer in cache.layers):
        return False
    if torch.is_grad_enabled() or model.training or torch.distributed.is_initialized():
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(inputs))
