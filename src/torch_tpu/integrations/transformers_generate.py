"""Transformers' `generate` with a static cache (tried on 5.20.2, 5.22.2 and 5.24.0): every prompt length would be a
prefill of its own, run operator by operator, and every length of the cache another decode program.

Here the cache's length is rounded up, and the prompt is padded on the right to a bucket and prefilled by a compiled
program; prefill and decode are captured without Dynamo where that serves (transformers_forward.py). The result is that
of the unpadded prompt: under the causal mask no token sees the padding, whose keys and values are overwritten by the
tokens generated later, before any of them attends to these slots. Only caches of plain full attention are treated so; a
model with sliding windows, linear attention or an encoder prefills as Transformers does it. TORCH_TPU_BUCKETS=off
leaves `generate` as it is.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from ..runtime import config
from . import on_import

SMALLEST = 16  # tokens of the smallest prefill bucket
STEP = 512  # above this many tokens, buckets are multiples of it
CACHE = 1024  # the least length of a cache for up to CACHE_BATCH sequences
CACHE_BATCH = 4


def install() -> None:
    on_import.after("transformers.generation.utils", _adapt)
    on_import.after("transformers.modeling_utils", _adapt_decoding)


def bucket(length: int) -> int:
    """The prefill length of a prompt: a power of two from 16 to 512 tokens, then a multiple of 512."""
    if length > STEP:
        return -(-length // STEP) * STEP
    return max(SMALLEST, 1 << (length - 1).bit_length())


def cache_length(length: int, batch: int) -> int:
    """The length of a static cache for so many tokens of each sequence: at least 1,024 for a small batch (so that one
    decode program serves all usual calls), else 128; a power of two, and multiples of 512 from there."""
    least = CACHE if batch <= CACHE_BATCH else 128
    return max(least, bucket(length))


def _adapt(module: ModuleType) -> None:
    mixin = module.GenerationMixin
    if not hasattr(mixin, "_prefill") or not hasattr(mixin, "_prepare_static_cache"):
        return  # another version of Transformers: it does what it does
    prefill, prepare = mixin._prefill, mixin._prepare_static_cache

    @functools.wraps(prepare)
    def _prepare_static_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        length = kwargs.get("max_cache_len")
        if isinstance(length, int) and _ours(self):
            kwargs["max_cache_len"] = cache_length(length, kwargs.get("batch_size") or 1)
        return prepare(self, *args, **kwargs)

    @functools.wraps(prefill)
    def _prefill(self: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any],
                 is_first_iteration: bool = True) -> Any:
        if _ours(self) and is_first_iteration and _suits(self, input_ids, generation_config, model_kwargs):
            return _padded(self, input_ids, model_kwargs)
        return prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=is_first_iteration)

    mixin._prepare_static_cache = _prepare_static_cache
    mixin._prefill = _prefill


def _adapt_decoding(module: ModuleType) -> None:
    kind = module.PreTrainedModel
    if not hasattr(kind, "get_compiled_call"):
        return
    get_compiled_call = kind.get_compiled_call

    @functools.wraps(get_compiled_call)
    def compiled(self: Any, compile_config: Any) -> Any:
        if not _ours(self) or not _default(self, compile_config):
            return get_compiled_call(self, compile_config)

        def traced(*args: Any, **inputs: Any) -> Any:
            return get_compiled_call(self, compile_config)(*args, **inputs)

        return _captured(self, "decode", traced)

    kind.get_compiled_call = compiled


def _default(model: Any, settings: Any) -> bool:
    """Whether compilation was asked for without a setting of Dynamo's."""
    return settings is None or settings == model._default_compile_config()


def _ours(model: Any) -> bool:
    return model.device.type == "tpu" and not model.config.is_encoder_decoder and config.BUCKETS.flag()


_KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}  # and the cache


def _suits(model: Any, ids: torch.Tensor, generation: Any, given: dict[str, Any]) -> bool:
    """Whether padding changes nothing here: an empty static cache of full attention, token ids, one row of logits."""
    from transformers.cache_utils import StaticLayer

    from .transformers_forward import cache_name

    named = cache_name()
    cache, mask, positions = (given.get(name) for name in (named, "attention_mask", "position_ids"))
    known = _KNOWN | {named}
    if any(value is not None and name not in known for name, value in given.items() if not name.startswith("output_")):
        return False
    if any(given.get(name) for name in given if name.startswith("output_")) or given.get("logits_to_keep") != 1:
        return False
    if cache is None or not all(type(layer) is StaticLayer for layer in cache.layers) or ids.dim() != 2:
        return False
    if generation.prefill_chunk_size is not None or generation.is_assistant or not given.get("use_cache", True):
        return False
    if (mask is not None and mask.shape != ids.shape) or (positions is not None and positions.shape != ids.shape):
        return False
    if not model._valid_auto_compile_criteria(given, generation) or ids.shape[1] > cache.layers[0].max_cache_len:
        return False
    settings = generation.compile_config
    if settings is not None and settings.backend != "tpu":
        return False
    if any(layer.is_initialized for layer in cache.layers):
        return int(cache.get_seq_length()) == 0
    shape = model._get_static_cache_init_shape()
    if shape is None or torch.is_autocast_enabled("tpu"):  # only the first keys and values say which dtype they have
        return False
    cache.early_initialization(ids.shape[0], *shape, dtype=model.dtype, device=model.device)
    return True


def _padded(model: Any, ids: torch.Tensor, given: dict[str, Any]) -> Any:
    from .transformers_forward import cache_name

    cache = given[cache_name()]
    length = ids.shape[1]
    extra = min(bucket(length), cache.layers[0].max_cache_len) - length
    if extra:
        pad = torch.nn.functional.pad
        given = dict(given)
        ids = pad(ids, (0, extra))
        if given.get("attention_mask") is not None:
            given["attention_mask"] = pad(given["attention_mask"], (0, extra), value=1)
        if given.get("position_ids") is not None:  # clamped, not counted on: a table of positions may end there
            last = given["position_ids"][:, -1:].expand(-1, extra)
            given["position_ids"] = torch.cat([given["position_ids"], last], dim=1)
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=None, is_first_iteration=True, **given)
    inputs["logits_to_keep"] = torch.tensor([length - 1], device=ids.device)
    outputs = _program(model)(**inputs, return_dict=True)
    if extra:
        for layer in cache.layers:  # as StaticLayer.crop does it, which versions before 5.23 have not
            layer.cumulative_length.sub_(extra)
    return outputs


def _program(model: Any) -> Any:
    """The model's forward, compiled for prefill; one executable a bucket."""
    found: Any = None  # not in the model, which could not be saved with it

    def traced(**inputs: Any) -> Any:
        nonlocal found
        if found is None:
            found = torch.compile(
                model.__call__, backend="tpu", dynamic=False, recompile_limit=64,  # type: ignore[call-overload]
                isolate_recompiles=True)
        length = inputs["input_ids"].shape[1]
        for name, dimension in (("input_ids", 1), ("position_ids", 1), ("attention_mask", 2)):
            value = inputs.get(name)
            if isinstance(value, torch.Tensor) and value.dim() > dimension and value.shape[dimension] == length:
                torch._dynamo.maybe_mark_dynamic(value, dimension)  # traced once for all buckets
        return found(**inputs)

    return _captured(model, "prefill", traced)


def _captured(model: Any, name: str, otherwise: Any) -> Any:
    from .transformers_forward import Forward

    found = model.__dict__.get(f"_tpu_{name}")
    if found is None:
        found = model.__dict__[f"_tpu_{name}"] = Forward(model, name, otherwise)
    return found
