"""Programs in files: what a model computes, as portable StableHLO for several platforms, with libtpu's executables
beside it, and without the weights. `export` writes one, `load` makes it callable on the device.

The StableHLO is JAX's own serialisation (jax.export), which later versions of JAX read.
"""

from __future__ import annotations

import importlib.util
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..eager import random
from ..runtime import client, dtypes, dynamo_door, errors, executable, jax_door, transfer
from ..tensor import buffer
from . import compiling, tracing, weightless

FORMAT = 1
_PLAIN = (bool, int, float, str, type(None))


def _need_flatbuffers() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError("JAX writes and reads exported programs with flatbuffers: pip install 'torch_tpu[export]'")


class _Export(tracing._Trace):
    """A capture that ends with a serialised program. `platform`: what it is for."""

    platform: str

    def _lower(self, made: Any, given: list[Any]) -> tuple[bytes, tuple[bool, ...]]:
        if self.recorder.numbers:
            raise errors.CaptureError("a float argument is an input of a program, and an exported one takes tensors "
                                      "only; pass it as a tensor, or fix it in a function")

        def program(*arrays: Any) -> list[Any]:
            return jax_door.replay(made.traced.jaxpr, arrays)

        with dynamo_door.untraced():
            self.results = [(tuple(each.shape), np.dtype(each.dtype).name) for each in jax_door.results(made.traced)]
            data = jax_door.export(program, made.avals, made.donate, self.platform)
        return data, tuple(sorted(made.pins.items()))  # type: ignore[return-value]


def export(path: str | Path, model: Callable[..., Any], example_inputs: Any = (), *,
           platforms: Sequence[str] = ("cpu", "tpu"), topologies: Sequence[str] = (), name: str = "") -> Path:
    """Writes what a model or a function computes for inputs of these shapes.

    Args:
        path: the file to write.
        model: a module (its forward, without gradients), a torch.export.ExportedProgram, or a function of tensors and
            modules. Its weights are not in the file, except for buffers that a state_dict does not have.
        example_inputs: as for torch_tpu.aot.compile. Tensors that the function writes in place are written by the
            loaded program, too.
        platforms: "cpu" for virtual chips, "tpu" for chips.
        topologies: for these ("v5e-1"), libtpu's executable is put in, too; it serves the same version of libtpu only.
        name: for logs.

    Returns:
        The path.

    Raises:
        CaptureError: the code does what no program can do, or takes floats.
        ImportError: flatbuffers is not installed.
        ValueError: an unknown platform, or a result that is neither tensors nor plain values.
    """
    _need_flatbuffers()
    path = Path(path)
    model = compiling.module_of(model)
    name = name or getattr(model, "__name__", type(model).__name__)
    args, kwargs = compiling._arguments(example_inputs)
    manifest: dict[str, Any] = {"format": FORMAT, "name": name, "torch": torch.__version__, "jax": jax.__version__,
                                "platforms": list(platforms)}
    parts: dict[str, bytes] = {}
    for platform in platforms:
        if platform not in ("cpu", "tpu"):
            raise ValueError(f"platform {platform!r} is not known; it is 'cpu' (virtual chips) or 'tpu'")
        found, data = _traced(model, args, kwargs, name, platform)
        manifest.setdefault("programs", {})[platform] = found
        parts[f"{platform}.stablehlo"] = data
    for topology in topologies:
        parts[f"{topology}.executable"] = compiling.compile(model, example_inputs, topology, name=name).executable
    constants = _constants(model)
    manifest["constants"] = {each: [list(value.shape), dtypes.to_numpy(value.dtype).name]
                             for each, value in constants.items()}
    for each, value in constants.items():
        parts[f"constants/{each}"] = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() \
            if value.dim() else value.detach().cpu().reshape(1).view(torch.uint8).numpy().tobytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.json", json.dumps(manifest, indent=1))
        for part, data in parts.items():
            file.writestr(part, data)
    return path


def _traced(model: Any, args: Any, kwargs: Any, name: str, platform: str) -> tuple[dict[str, Any], bytes]:
    copied, args, kwargs = weightless.copy_of((model, args, kwargs))
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    shapes: dict[str, Any] = {}

    def flat(args: Any, kwargs: Any) -> list[torch.Tensor]:
        result = copied(*args, **kwargs)
        made: list[torch.Tensor] = []
        shapes["result"] = _encode(result, made)
        return [value.clone(memory_format=torch.contiguous_format) for value in made]

    names = compiling._names((copied, args, kwargs), {})
    names.update((id(buffer.of(leaf)), f"input {number}") for number, leaf in enumerate(leaves))
    with torch.no_grad():
        traced = tracing.trace(flat, (args, kwargs), {}, name, names, platform=platform, kind=_Export)
    unknown = [each.name for each in traced.arguments if each.name in (
        "a tensor of the function", "a tensor of the host", "optimizer state", "a number")]
    if unknown:
        raise errors.CaptureError(f"{name} uses {unknown[0]} that is neither a parameter, a buffer nor an argument, "
                                  "so a loaded program would not know it; pass it as an argument")
    written: Any = traced.free
    pins: dict[int, int] = dict(written)
    given: list[torch.Tensor] = []
    return {"inputs": _encode([list(args), dict(kwargs)], given),
            "tensors": [[list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] for leaf in given],
            "arguments": [[each.name, list(each.shape), each.dtype] for each in traced.arguments],
            "updated": sorted([result, argument] for result, argument in pins.items()),
            "result": shapes["result"]}, traced.module


def _constants(model: Any) -> dict[str, torch.Tensor]:
    """Buffers of a module that its state_dict lacks, where they have values."""
    if not isinstance(model, torch.nn.Module):
        return {}
    kept = model.state_dict(keep_vars=True)
    return {name: value for name, value in model.named_buffers() if name not in kept and value.device.type != "meta"}


def _encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A structure of tensors and plain values as JSON; tensors are numbered in their order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _encode(each, tensors) for key, each in value.items()}}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(each, tensors) for each in value]}
    if isinstance(value, _PLAIN):
        return {"value": value}
    if isinstance(value, torch.nn.Module):
        return {"module": type(value).__name__}
    raise ValueError(f"an exported program takes and gives tensors, plain values, and tuples, lists and dicts of them; "
                     f"got a {type(value).__name__}")


def _decode(what: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind, value = next(iter(what.items()))
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _decode(each, tensors) for key, each in value.items()}
    if kind in ("list", "tuple"):
        return (tuple if kind == "tuple" else list)(_decode(each, tensors) for each in value)
    return value


class Saved:
    """A program from a file, callable with tensors of the shapes it was exported for. Made by `load`.

    Attributes:
        name: of what was exported.
    """

    def __init__(self, manifest: dict[str, Any], data: bytes, weights: Mapping[str, torch.Tensor]) -> None:
        self.name = manifest["name"]
        platform = client.get().platform.name
        self._program = manifest["programs"][platform]
        self._weights = weights
        avals = [jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype)) for _, shape, dtype in self._program["arguments"]]
        missing = [name for name, _, _ in self._program["arguments"]
                   if not name.startswith("input ") and name != "random keys" and name not in weights]
        if missing:
            raise ValueError(f"{self.name} needs the weights {', '.join(missing[:5])}"
                             f"{' and others' if len(missing) > 5 else ''}; load(path, model), or a state_dict")
        call = jax_door.exported(data)
        pins = self._program["updated"]
        self._executable = executable.build(call, avals, self.name, [argument for _, argument in pins], graph=True,
                                            cause="loaded", pins=lambda: [tuple(each) for each in pins])

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the exported code gives.

        Raises:
            TypeError: other arguments than those it was exported with.
            ValueError: a tensor of another shape or dtype, or a weight of another shape.
        """
        given: list[torch.Tensor] = []
        if _encode([list(args), dict(kwargs)], given) != self._program["inputs"]:
            raise TypeError(f"{self.name} was exported for other arguments; it takes "
                            f"{json.dumps(self._program['inputs'])}, tensors in this order: "
                            f"{self._program['tensors']}")
        for number, (tensor, (shape, dtype)) in enumerate(zip(given, self._program["tensors"])):
            if list(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
                raise ValueError(f"{self.name}: tensor {number} is {tensor.dtype}{list(tensor.shape)}, it was exported "
                                 f"for torch.{dtype}{shape}")
        buffers = [self._buffer(name, shape, given) for name, shape, _ in self._program["arguments"]]
        donated = {argument for _, argument in self._program["updated"]}
        arrays = []
        for position, (held, (_, shape, _)) in enumerate(zip(buffers, self._program["arguments"])):
            if held is None:
                arrays.append(transfer.host_value(random.draw(None, shape[0])))
                continue
            if position in donated and held.shared:
                held.rebind(buffer.of(buffer.wrap(held.array()).clone()).array())  # type: ignore[union-attr]
            arrays.append(held.array())
        outputs = self._executable(arrays)
        updated = dict(self._program["updated"])
        for result, argument in updated.items():
            buffers[argument].rebind(outputs[result])  # type: ignore[union-attr]
        fresh = [buffer.wrap(array) for number, array in enumerate(outputs) if number not in updated]
        return _decode(self._program["result"], fresh)

    def _buffer(self, name: str, shape: list[int], given: Sequence[torch.Tensor]) -> buffer.Buffer | None:
        if name == "random keys":
            return None
        tensor = given[int(name.split()[1])] if name.startswith("input ") else self._weights[name]
        held = buffer.of(tensor)
        if held is None:
            held = buffer.of(tensor.to("tpu"))
            assert held is not None
        if list(held.shape) != shape or held.dtype != dtypes.to_numpy(tensor.dtype):
            tensor = tensor.detach().contiguous().clone()
            held = buffer.of(tensor.view(shape) if tensor.numel() == np.prod(shape) else tensor)
            assert held is not None
            if list(held.shape) != shape:
                raise ValueError(f"{self.name}: {name} has shape {list(held.shape)}, it was exported for {shape}")
        return held


def load(path: str | Path, weights: torch.nn.Module | Mapping[str, torch.Tensor] | None = None) -> Saved:
    """A program that `export` wrote, on this process's device: XLA compiles it, or the disk cache has it.

    Args:
        weights: the module, or a state_dict with the same names. Its tensors are used, not copied, where they are on
            the device; others are moved there once.

    Raises:
        ValueError: no such file format, a program for other platforms, or weights that are missing.
    """
    _need_flatbuffers()
    platform = client.get().platform.name
    with zipfile.ZipFile(path) as file:
        manifest = json.loads(file.read("manifest.json"))
        if manifest.get("format") != FORMAT:
            raise ValueError(f"{path} has format {manifest.get('format')}, this version reads {FORMAT}")
        if platform not in manifest["platforms"]:
            raise ValueError(f"{path} was exported for {', '.join(manifest['platforms'])}, this device is {platform}; "
                             f"export it with platforms=('{platform}',)")
        data = file.read(f"{platform}.stablehlo")
        held = {name: _constant(file.read(f"constants/{name}"), shape, dtype)
                for name, (shape, dtype) in manifest["constants"].items()}
    if isinstance(weights, torch.nn.Module):
        held.update(weights.named_parameters(remove_duplicate=False))
        held.update(weights.named_buffers(remove_duplicate=False))
    else:
        held.update(weights or {})
    return Saved(manifest, data, {name: value.detach().to("tpu") for name, value in held.items()})


def _constant(data: bytes, shape: list[int], dtype: str) -> torch.Tensor:
    kind = dtypes.to_torch(np.dtype(dtype))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)
