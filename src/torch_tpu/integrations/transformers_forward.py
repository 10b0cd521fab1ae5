"""The forward of a Transformers model over a static cache, captured as one program for each shape of its inputs.

Dynamo takes seconds to trace a deep decoder, and again in every process. A capture (compile/step.py) runs the model's
Python code once on tensors without data, in a tenth of that, and its checks cost less at each token. It is used where
that code has no effect but on tensors: a static cache of plain layers, no hooks of the user, tensors and plain values
as inputs. Everything else goes through torch.compile, as does a model whose code a capture refuses (said once), and
all of it under TORCH_TPU_CAPTURE=off or another stance of torch.compiler.
"""

from __future__ import annotations

import operator
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..compile import cache_layout, compile_doors
from ..compile.step import CompiledStep, describe
from ..runtime import config, errors, partition
from ..tensor import buffer, placement

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.Tensor)


def cache_name() -> str:
    """The argument of a model's forward that is the cache: `past_key_values` until Transformers 5.22."""
    from transformers.generation.utils import ALL_CACHE_NAMES

    return "cache" if "cache" in ALL_CACHE_NAMES else "past_key_values"


class Forward:
    """Calls the model; `otherwise` is what to call where a capture does not serve.

    Attributes:
        refused: why a capture was refused, once it was.
    """

    def __init__(self, model: Any, name: str, otherwise: Callable[..., Any]) -> None:
        self.model = model
        self.otherwise = otherwise
        self.refused: str | None = None
        self._name = cache_name()
        self._step = CompiledStep(self._run, f"{type(model).__name__}.{name}", {}, True, many=True)
        self._captured = threading.local()  # .cache: what this thread's capture writes
        self._known: tuple[list[weakref.ref[torch.Tensor]], tuple[Any, ...]] = ([], ())  # of the last cache
        self._made: tuple[type, tuple[str, ...]] = (dict, ())
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooks: list[Any] = []

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        cache = inputs.pop(self._name, None)
        leaves, spec = pytree.tree_flatten(inputs)
        if not self._hooks:
            self._hooks = _hooks(self.model)
        if args or self.refused or any(self._hooks) or not _suits(self.model, cache, leaves):
            return self.otherwise(*args, **inputs, **{self._name: cache})
        if any(now != before for now, before in self._settings):  # the attention's implementation, for one
            self._step.reset()
            self._settings = []
        if not self._settings:
            self._settings = [(vars(part), dict(vars(part))) for part in _configs(self.model.config)]
        if partition.current is not None:
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
                    placement.batch(leaf)
        tensors, described = self._tensors(cache)
        self._captured.cache = cache
        try:
            outputs = self._step.call((inputs, tensors), {}, [*leaves, *tensors], (spec, len(tensors)),
                                      (*map(describe, leaves), *described))
        except _Hooked:
            return self.otherwise(**inputs, **{self._name: cache})
        except errors.CaptureError as error:
            self.refused = str(error)
            warnings.warn(f"torch_tpu: {type(self.model).__name__} goes through torch.compile, since its code cannot "
                          f"be captured: {error}", RuntimeWarning, stacklevel=2)
            return self.otherwise(**inputs, **{self._name: cache})
        finally:
            self._captured.cache = None  # it must not outlive `generate`
        kind, names = self._made
        return kind(**outputs, **dict.fromkeys(names, cache))

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied or saved model makes its own

    def _tensors(self, cache: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """The cache's tensors, arguments of the program, and what of them it depends on. Beam search puts others in
        their place."""
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]
        references, described = self._known
        known = [reference() for reference in references]
        if len(tensors) != len(known) or not all(map(operator.is_, known, tensors)):
            cache_layout.drop_leading_ones(buffer.of(tensor) for tensor in tensors if tensor.dim() == 4)
            described = tuple(map(describe, tensors))
            self._known = [weakref.ref(tensor) for tensor in tensors], described
        return tensors, described

    def _run(self, inputs: dict[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
        self._hooks = _hooks(self.model)
        if any(self._hooks):
            raise _Hooked
        compile_doors.count_graph()
        cache = self._captured.cache
        outputs = self.model(**inputs, **{self._name: cache})
        if not isinstance(outputs, dict):
            raise errors.CaptureError(f"the model returns a {type(outputs).__name__}, not a ModelOutput")
        self._made = type(outputs), tuple(name for name, value in outputs.items() if value is cache)
        return {name: value for name, value in outputs.items() if value is not cache}


def _configs(config: Any) -> list[Any]:
    """A model's configuration and those inside it."""
    return [config, *(part for value in vars(config).values() if hasattr(value, "to_diff_dict")
                      for part in _configs(value))]


class _Hooked(Exception):
    """The model has hooks, which run at every call."""


def _hooks(model: Any) -> list[Any]:
    places = [place for module in model.modules() for place in (module._forward_hooks, module._forward_pre_hooks)]
    return [_Others(place) if any(map(_is_ours, place.values())) else place for place in places]


def _is_ours(hook: Any) -> bool:
    """The hook of a mesh, which only spreads arguments; here that is done before the capture."""
    return getattr(hook, "tpu_mesh", False)


class _Others:
    """True where a place for hooks holds others than ours."""

    def __init__(self, place: dict[int, Any]) -> None:
        self.place = place

    def __bool__(self) -> bool:
        return not all(map(_is_ours, self.place.values()))


def _suits(model: Any, cache: Any, leaves: list[Any]) -> bool:
    """Whether the model's Python code, for this call, does nothing but compute on tensors."""
    from transformers.cache_utils import StaticLayer

    if cache is None or not all(type(layer) is StaticLayer and layer.is_initialized for layer in cache.layers):
        return False
    if not config.CAPTURE.flag() or not compile_doors.compiles():
        return False
    if torch.is_grad_enabled() or model.training:
        return False
    return all(isinstance(leaf, _PLAIN) for leaf in leaves)
