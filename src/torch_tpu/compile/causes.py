"""Why a graph is compiled: what differs from the compilations of the same code before."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..runtime import config

FIRST = "first call"
MANY = 8  # compilations of one piece of code after which a warning names the cause

Description = Mapping[str, str]

_frames: dict[str, list[Description]] = {}
_warned: set[str] = set()


def reset() -> None:
    _frames.clear()
    _warned.clear()


def of_graph(gm: torch.fx.GraphModule, name: str) -> str:
    """Why Dynamo traced this code again, in words."""
    frame = str(gm.meta.get("dynamo_compile_id", name)).rpartition("/")[0] or name
    now = {_source(node): _describe(node.meta.get("example_value")) for node in gm.graph.nodes
           if node.op == "placeholder"}
    before = _frames.setdefault(frame, [])
    cause = _nearest(before, now) if before else FIRST
    before.append(now)
    if cause is not FIRST:
        _tell(name, cause, len(before), f"frame {frame}")
    return cause


def of_sizes(nodes: Sequence[torch.fx.Node], before: Sequence[Any], now: Sequence[Any], name: str, count: int) -> str:
    """Why a graph that serves several sizes needs another program.

    Args:
        nodes: the graph's inputs.
        before, now: for each input its number, or what identifies its memory: (which buffer, kind, offset) and, where
            sizes vary, the sizes and strides.
        name: of the graph.
        count: programs it has already.
    """
    sizes: dict[str, None] = {}
    others: list[str] = []
    for node, old, new in zip(nodes, before, now):
        if old == new:
            continue
        value = node.meta.get("val")
        if not isinstance(new, tuple):
            sizes[f"{_symbol(value, _source(node))}: {old} -> {new}"] = None
        elif len(new) == 5 and old[3] != new[3] and isinstance(value, torch.Tensor):
            for d, (size, fresh) in enumerate(zip(old[3], new[3])):
                if size != fresh:
                    where = _symbol(value.shape[d], f"{_source(node)} dimension {d}")
                    sizes[f"{where}: {size} -> {fresh}"] = None
        else:
            others.append(f"{_source(node)} lies otherwise in memory")
    parts = [*sizes] or others
    cause = "; ".join(parts[:3]) or "an input that shared memory with another, or a global setting"
    _tell(name, cause, count + 1, name)
    return cause


def _tell(name: str, cause: str, count: int, code: str) -> None:
    if config.logs("recompile") or config.logs("compile"):
        print(f"torch_tpu: compiling {name} again, for the {count}th time: {cause}", file=sys.stderr)
    if count > MANY and code not in _warned:
        _warned.add(code)
        warnings.warn(
            f"torch_tpu: the same code was compiled {count} times ({name}); the last time because of {cause}. Every "
            "compilation costs seconds: pad this size to a few values (powers of two), pass it as a tensor instead of "
            "a number, or keep the last partial batch out (drop_last=True). torch.tpu.explain() lists all causes.",
            stacklevel=2)


def _nearest(before: Sequence[Description], now: Description) -> str:
    return min((_difference(each, now) for each in before), key=lambda parts: parts[0])[1]


def _difference(before: Description, now: Description) -> tuple[int, str]:
    parts = [f"{name}: {before[name]} -> {now[name]}" for name in now if name in before and before[name] != now[name]]
    parts += [f"{name} is new" for name in now if name not in before]
    parts += [f"{name} is gone" for name in before if name not in now]
    text = "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")
    return len(parts), text or ("no input changed, but something else that the code read: a global, an attribute of a "
                                "module, grad mode (TORCH_LOGS=recompiles names the guard)")


def _source(node: torch.fx.Node) -> str:
    """The Python expression an input comes from."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    text = name() if callable(name) else name
    return text if isinstance(text, str) else node.name


def _symbol(value: Any, otherwise: str) -> str:
    """The Python expression of a size."""
    if isinstance(value, torch.SymInt):
        sources = value.node.shape_env.var_to_sources.get(value.node.expr, [])
        if sources:
            name = sources[0].name
            return name() if callable(name) else name
    return otherwise


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]" + (" requiring a gradient" if value.requires_grad
                                                                          else "")
    return str(value)
