"""A model's layers, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from .layers import QUANTIZED, Int4Linear, Int8DynamicLinear, Int8Embedding, Int8Linear

MODES = ("int8", "int8_dynamic", "int4")
_LINEAR: dict[str, type[nn.Linear]] = {"int8": Int8Linear, "int8_dynamic": Int8DynamicLinear, "int4": Int4Linear}


def quantize(model: nn.Module, mode: str = "int8", *, group_size: int = 64, embeddings: bool = False,
             skip: Iterable[str] = ()) -> nn.Module:
    """Makes the weights of a model's linear layers small integers, in place, on the device where they are.

    Args:
        model: any module. Only layers whose class is `nn.Linear` itself are changed.
        mode: "int8": int8 weights with a scale for each output, activations stay as they are. "int8_dynamic": the
            activations become int8 as well, with a scale for each row, at each call. "int4": weights of four bits with
            a scale for each `group_size` inputs; layers whose inputs that does not divide, and the output layer, become
            int8.
        embeddings: embeddings become int8 with a scale for each row too. A layer that shares its weight with one (a
            tied lm_head) then goes on sharing it. Without, such a layer gets an int8 copy of its own, and the
            embedding keeps its floats.
        skip: names of layers, or of modules that contain them, that stay as they are: whole ones or parts between dots
            ("lm_head", "self_attn", "layers.0").

    Returns:
        The same model.

    Raises:
        TypeError: `model` is no module.
        ValueError: the mode is unknown, nothing in the model can be quantized, weights are offloaded, or divided
            among processes (DTensor).
    """
    layers = plan(model, mode, group_size=group_size, embeddings=embeddings, skip=skip)
    if not layers:
        raise ValueError(f"quantize: {type(model).__name__} has no nn.Linear layer to quantize (all skipped, or "
                         "already quantized); give a model whose linear layers are of torch.nn.Linear")
    return finish(model, mode, group_size=group_size, embeddings=embeddings, skip=skip)


def finish(model: nn.Module, mode: str, *, group_size: int, embeddings: bool, skip: Iterable[str]) -> nn.Module:
    """As `quantize`, where nothing may be left to do."""
    layers = plan(model, mode, group_size=group_size, embeddings=embeddings, skip=skip)
    modules: dict[str, Any] = dict(model.named_modules())
    for name, _ in layers:
        if isinstance(modules[name].weight, DTensor):
            raise ValueError(f"quantize: {name}.weight is a DTensor, divided among processes, and its scales would not "
                             "be; one process drives several chips with torch.tpu.mesh(tp=N).shard(model), which takes "
                             "quantized models")
        if "_old_forward" in vars(modules[name]):  # Accelerate's hook has kept the old class's forward
            raise ValueError(f"quantize: weights of {name} are dispatched or offloaded by Accelerate; load the model "
                             "on one device, or quantize it before it is dispatched")
    _no_fast_path(model)
    shared = Counter(id(modules[name].weight) for name, _ in layers)
    done: dict[tuple[int, bool], tuple[nn.Parameter, nn.Parameter, nn.Parameter]] = {}
    for name, kind in layers:
        layer = modules[name]
        before = layer.weight  # kept in `done`, so that no other parameter gets its id
        layer.__class__ = kind
        key = id(before), kind is Int4Linear
        if key in done:
            _, layer.weight, layer.weight_scale = done[key]
            continue
        layer.quantize_(group_size)
        if shared[id(before)] > 1:
            done[key] = before, layer.weight, layer.weight_scale
    _retie(model)
    return model


def plan(model: Any, mode: str, *, group_size: int, embeddings: bool,
         skip: Iterable[str]) -> list[tuple[str, type[nn.Module]]]:
    """Names of the layers that `quantize` changes, and the classes that they get."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: expected a torch.nn.Module, got {type(model).__name__}")
    check(mode, group_size)
    layers = list(_layers(model, embeddings, tuple(skip)))
    output = _output_layer(model)
    tied = {id(layer.weight) for _, layer in layers if isinstance(layer, nn.Embedding)}
    return [(name, target(layer, mode, group_size, int8=layer is output or id(layer.weight) in tied))
            for name, layer in layers]


def check(mode: str, group_size: int) -> None:
    """Raises what is wrong with the arguments."""
    if mode not in MODES:
        raise ValueError(f"quantize: unknown mode {mode!r}; one of {', '.join(MODES)}")
    if group_size < 2 or group_size % 2:
        raise ValueError(f"quantize: group_size must be even and at least 2, got {group_size}")


def target(layer: nn.Module, mode: str, group_size: int, int8: bool) -> type[nn.Module]:
    """The class that a layer gets. `int8`: four bits are too few for it."""
    if isinstance(layer, nn.Embedding):
        return Int8Embedding
    assert isinstance(layer, nn.Linear)
    if mode == "int4" and (int8 or layer.in_features % group_size):
        return Int8Linear
    return _LINEAR[mode]


def _retie(model: Any) -> None:
    """Tells a Transformers model what its output layer shares with the embedding: the scales too, or nothing."""
    config, output = getattr(model, "config", None), _output_layer(model)
    ties = getattr(model, "_tied_weights_keys", None)
    if config is None or not isinstance(ties, dict) or not isinstance(output, QUANTIZED):
        return
    if output.weight is getattr(model.get_input_embeddings(), "weight", None):
        model._tied_weights_keys = ties = dict(ties)  # the class has it
        for of in (ties, model.all_tied_weights_keys):
            more = {f"{a}_scale": f"{b}_scale" for a, b in of.items() if a.endswith(".weight")}
            of.update({a: b for a, b in more.items() if not a.endswith("_scale_scale")})
        return
    for each in {id(c): c for c in (config, _text_config(config))}.values():
        if hasattr(each, "tie_word_embeddings"):
            each.tie_word_embeddings = False
    model._tied_weights_keys = None
    model.all_tied_weights_keys = {}


def dequantize(model: nn.Module) -> nn.Module:
    """Makes the quantized layers floating-point layers again, in place, with the weights that the integers stand for.
    Layers that share a weight go on sharing it."""
    done: dict[int, tuple[Any, nn.Parameter]] = {}
    quantized: list[Any] = [layer for layer in model.modules() if isinstance(layer, QUANTIZED)]
    for layer in quantized:
        before = layer.weight  # kept in `done`, so that no other parameter gets its id
        if id(before) not in done:
            done[id(before)] = before, nn.Parameter(layer.floats().contiguous(), requires_grad=False)
        del layer.weight_scale
        layer.weight = done[id(before)][1]
        layer.__class__ = nn.Embedding if isinstance(layer, nn.Embedding) else nn.Linear
    return model


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer of the model is quantized."""
    return any(isinstance(layer, QUANTIZED) for layer in model.modules())


def _no_fast_path(model: nn.Module) -> None:
    """PyTorch's encoder layers have a way for inference that reads the weights of their linear layers themselves."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _layers(model: nn.Module, embeddings: bool, skip: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if type(layer) is not nn.Linear and not (embeddings and type(layer) is nn.Embedding and layer.max_norm is None):
            continue
        if not any(f".{each}." in f".{name}." for each in skip):
            yield name, layer


def _output_layer(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return get() if get is not None else None


def _text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return get() if get is not None else config
