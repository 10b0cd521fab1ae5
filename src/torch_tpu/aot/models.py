"""Decoders of Transformers without weights, and the programs that serve and train them (tried on transformers 5.24)."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import compiling, weightless
from .tracing import Program

PROGRAMS = ("prefill", "decode", "train")


class UnknownModel(ValueError):
    """A name that is neither a folder nor a configuration of Transformers."""


@dataclass(frozen=True)
class Shape:
    """Sequences, tokens of the prompt (and of a training example), and tokens that the cache holds."""

    batch: int = 1
    prompt: int = 512
    cache: int = 1024


def config(name: str, changes: dict[str, Any] | None = None) -> Any:
    """A configuration, by a folder (or file) that holds config.json, a class ("Qwen3Config"), or a type ("qwen3").

    Args:
        changes: fields to set.

    Raises:
        UnknownModel: there is no such thing here. Nothing is downloaded.
    """
    import transformers
    from transformers import AutoConfig

    path = Path(name).expanduser()
    changes = dict(changes or {})
    if path.exists():
        if not path.is_file():
            path = path / "config.json"
            if not path.exists():
                raise UnknownModel(f"{name}: the folder has no config.json")
        fields = json.loads(path.read_text())
        if "model_type" not in fields:
            raise UnknownModel(f"{path} has no model_type, so it is no configuration of a Transformers model")
        return AutoConfig.for_model(**{**fields, **changes})
    kind = getattr(transformers, name, None) if name.endswith("Config") else None
    if kind is not None:
        return kind(**changes)
    try:
        return AutoConfig.for_model(name, **changes)
    except ValueError as error:
        raise UnknownModel(f"{name!r} is no folder, no configuration class of Transformers (Qwen3Config) and no model "
                           "type (qwen3); nothing is downloaded") from error


def model(settings: Any, dtype: torch.dtype) -> Any:
    """The causal language model of a configuration, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()


def program(model: Any, kind: str, shape: Shape, mesh: Mapping[str, int] | None = None) -> Program:
    """One of PROGRAMS, traced (for the chips of a mesh). Prefill and decode are what `generate` with a static cache
    runs: prefill gives the logits of the last token of a whole prompt, decode those of one token a sequence; both write
    the cache in place."""
    name = f"{type(model).__name__} {kind}"
    if kind == "train":
        ids = _integers(shape.batch, shape.prompt)
        return compiling.trace(model.train(), {"input_ids": ids, "labels": ids}, train=True, name=name, mesh=mesh)
    tokens = shape.prompt if kind == "prefill" else 1
    if tokens > shape.cache:
        raise ValueError(f"the prompt of {tokens} tokens is longer than the cache of {shape.cache}")
    cache = static_cache(model, shape)

    def forward(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, position_ids=positions, cache=cache, logits_to_keep=1).logits

    with torch.no_grad():
        return compiling.trace(forward, (model.eval(), _integers(shape.batch, tokens), _integers(shape.batch, tokens)),
                               name=name, names={tensor: name for name, tensor in _tensors(cache)}, mesh=mesh,
                               caches=[tensor for _, tensor in _tensors(cache)])


def _integers(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.int64, device="meta")


def static_cache(model: Any, shape: Shape) -> Any:
    """A static cache without memory, laid out as that of `generate`: without a leading dimension of one."""
    from transformers import StaticCache

    sizes = model._get_static_cache_init_shape()
    cache: Any = StaticCache(config=model.config, max_cache_len=shape.cache)
    if sizes is not None:
        cache.early_initialization(shape.batch, *sizes, dtype=model.dtype, device=torch.device("meta"))
    else:  # keys and values of different sizes (multi-head latent attention): the layers see them at the first call
        _call_on_meta(model, cache, shape)
    for layer in cache.layers:
        layer.device = torch.device("tpu")
        for name, value in list(vars(layer).items()):
            if isinstance(value, torch.Tensor):
                setattr(layer, name, _laid(value))
    return cache


def _call_on_meta(model: Any, cache: Any, shape: Shape) -> None:
    """A first call, of one token, that computes nothing."""
    copied = copy.deepcopy(model).to("meta")
    ids = _integers(shape.batch, 1)
    with torch.no_grad():
        copied(input_ids=ids, position_ids=ids, cache=cache)


def _laid(value: torch.Tensor) -> torch.Tensor:
    ones = next((at for at, size in enumerate(value.shape[:-1]) if size != 1), 0)
    made = weightless.tensor(value.shape[ones:], value.dtype)
    return made.view(value.shape)


def _tensors(cache: Any) -> list[tuple[str, torch.Tensor]]:
    return [(f"cache.layers.{number}.{name}", value) for number, layer in enumerate(cache.layers)
            for name, value in vars(layer).items() if isinstance(value, torch.Tensor)]
