"""Accelerate's and Transformers' device maps (tried on Accelerate 1.15.0 and Transformers 5.24.0): `device_map="auto"`
and its kin see the chip and its free HBM, and a model that does not fit is offloaded and computed on the chip."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any

import torch

from . import on_import

HOST = ("cpu", "disk")

Map = dict[str, Any]


def install() -> None:
    on_import.after("accelerate.utils.modeling", _max_memory)
    on_import.after("accelerate.utils.modeling", _infer)
    on_import.after("accelerate.utils.memory", _smaller_batch)
    on_import.after("transformers.integrations.accelerate", _infer)


def _max_memory(module: ModuleType) -> None:
    theirs = module.get_max_memory

    @functools.wraps(theirs)
    def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
        """Accelerate's, with the chip's free HBM under its index where no other accelerator is found."""
        if max_memory is None:
            found = theirs(None)
            if any(isinstance(key, int) or key == "mps" for key in found):
                return found
            return {0: torch.tpu.mem_get_info(0)[0], **found}  # type: ignore[attr-defined]
        if torch.cuda.is_available():
            return theirs(max_memory)
        for key, value in max_memory.items():
            if isinstance(key, int) and key != 0:
                raise ValueError(f"max_memory names device {key}; one process drives one chip, which is 0")
            if isinstance(value, str):  # in place, as theirs does and Transformers expects
                max_memory[key] = module.convert_file_size_to_int(value)
        # Theirs would warn that device 0 does not exist, counting CUDA devices.
        rest = {key: value for key, value in max_memory.items() if key != 0}
        return {**{key: value for key, value in max_memory.items() if key == 0}, **(theirs(rest) if rest else {})}

    module.get_max_memory = get_max_memory  # type: ignore[attr-defined]


def _infer(module: ModuleType) -> None:
    theirs = module.infer_auto_device_map

    @functools.wraps(theirs)
    def infer_auto_device_map(model: torch.nn.Module, max_memory: dict[Any, Any] | None = None, *args: Any,
                              **kwargs: Any) -> Map:
        """Theirs; a map that leaves the chip without a module gets one there, so that all of it is computed there."""
        found = theirs(model, max_memory, *args, **kwargs)
        if torch.cuda.is_available() or not found or any(place not in HOST for place in found.values()):
            return found
        if max_memory is not None and not max_memory.get(0):
            _warn(f"{type(model).__name__} is put on the CPU and computed there, since max_memory gives the chip "
                  "nothing; to use it, add 0: its bytes, or leave max_memory away")
            return found
        name = _smallest(model, args[0] if args else kwargs.get("no_split_module_classes"))
        if name is None:
            _warn(f"{type(model).__name__} is put on the CPU and computed there: it does not fit on the chip "
                  f"({_room(max_memory)}), and it has no module that could be offloaded by itself. Give the chip more "
                  "memory, or move the model with .to('tpu')")
            return found
        _warn(f"no block of {type(model).__name__} fits on the chip beside the largest one, which is loaded when it "
              f"is needed ({_room(max_memory)}): all weights are offloaded to {' and '.join(_places(found))}, and "
              "computed on the chip one block at a time, which is slow. Give the chip more memory, or load the model "
              "in a smaller dtype")
        return _with(found, model, name)

    module.infer_auto_device_map = infer_auto_device_map  # type: ignore[attr-defined]


def _warn(text: str) -> None:
    warnings.warn(f"torch_tpu: {text}.", UserWarning, stacklevel=4)


def _places(found: Map) -> list[str]:
    return sorted({str(place) for place in found.values()})


def _room(max_memory: dict[Any, Any] | None) -> str:
    if max_memory is not None:
        return f"max_memory gives it {max_memory[0]} bytes"
    return f"{torch.tpu.mem_get_info(0)[0]} bytes of it are free"  # type: ignore[attr-defined]


def _smallest(model: torch.nn.Module, whole: Any) -> str | None:
    """The name of the module with the fewest bytes of its own that no class in `whole` (kept together) contains."""
    kept = {whole} if isinstance(whole, str) else set(whole or ())
    sizes: dict[str, int] = {}

    def visit(module: torch.nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if type(child).__name__ in kept or (prefix.count(".") and name.isdigit()):
                continue
            if next(child.children(), None) is not None:
                visit(child, f"{prefix}{name}.")
                continue
            own = [*child.parameters(), *child.buffers()]
            if own:
                sizes[prefix + name] = sum(tensor.numel() * tensor.element_size() for tensor in own)

    visit(model, "")
    return min(sizes, key=sizes.__getitem__, default=None)


def _with(found: Map, model: torch.nn.Module, name: str) -> Map:
    """The map with the module `name` on the chip, the entry that contained it taken apart."""
    parts = dict(found)
    while name not in parts:
        above = max((key for key in parts if not key or name.startswith(f"{key}.")), key=len)
        place = parts.pop(above)
        module = model.get_submodule(above)
        inside = [*module.named_children(), *module.named_parameters(recurse=False),
                  *module.named_buffers(recurse=False)]
        parts.update({f"{above}.{part}" if above else part: place for part, _ in inside})
    return {**parts, name: 0}




def _smaller_batch(module: ModuleType) -> None:
    theirs = module.should_reduce_batch_size

    @functools.wraps(theirs)
    def should_reduce_batch_size(exception: Exception) -> bool:
        """Theirs knows the messages of other devices; find_executable_batch_size asks it."""
        return isinstance(exception, torch.OutOfMemoryError) or theirs(exception)

    module.should_reduce_batch_size = should_reduce_batch_size  # type: ignore[attr-defined]
