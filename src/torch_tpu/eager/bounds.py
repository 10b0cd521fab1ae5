"""Index bounds on the device, checked in debug mode only: each check waits for the indices. XLA itself clamps or drops
an index that is out of range, where CPU PyTorch raises."""

from __future__ import annotations

from typing import Any

import torch

# Operator -> (index argument, indexed argument, exception, message). Dimension: argument `dim`, else the first.
_INDEXED: dict[str, tuple[str, str, type[Exception], str]] = {
    "embedding": ("indices", "weight", IndexError, "index out of range in self"),
    "_embedding_bag": ("indices", "weight", IndexError, "index out of range in self"),
    "_embedding_bag_forward_only": ("indices", "weight", IndexError, "index out of range in self"),
    "index_select": ("index", "self", IndexError, "index out of range in self"),
}
_OUT_OF_BOUNDS = "index {index} is out of bounds for dimension {dim} with size {size}"
for _name in ("gather", "scatter", "scatter_add", "scatter_reduce"):
    _INDEXED[_name] = ("index", "self", RuntimeError, _OUT_OF_BOUNDS)
for _name in ("index_add", "index_copy", "index_fill", "index_reduce"):
    _INDEXED[_name] = ("index", "self", IndexError, _OUT_OF_BOUNDS)


def check(op: Any, given: dict[str, Any]) -> None:
    """Raises PyTorch's own error for an index outside its dimension; `given` are the operator's arguments by name."""
    packet = str(op).split(".")[1].removesuffix("_")
    if packet in ("nll_loss_forward", "nll_loss2d_forward"):
        target, scores = given["target"], given["self"]
        classes = scores.shape[min(1, scores.dim() - 1)]
        wrong = (target < 0) | (target >= classes)
        counted = target != given.get("ignore_index", -100)
        _raise_first(target, wrong & counted, IndexError, "Target {index} is out of bounds.")
        return
    if packet in ("take", "put"):
        size = given["self"].numel()
        index = given["index"]
        _raise_first(index, (index < -size) | (index >= size), IndexError,
                     f"out of range: tried to access index {{index}} on a tensor of {size} elements.")
        return
    rule = _INDEXED.get(packet)
    if rule is None:
        return
    index, indexed = given[rule[0]], given[rule[1]]
    if indexed.dim() == 0 or not isinstance(index, torch.Tensor):
        return
    dim = given.get("dim", 0)
    size = indexed.shape[dim]
    _raise_first(index, (index < 0) | (index >= size), rule[2],
                 rule[3].replace("{dim}", str(dim)).replace("{size}", str(size)))


def _raise_first(index: torch.Tensor, wrong: torch.Tensor, kind: type[Exception], message: str) -> None:
    wrong = wrong.cpu()
    if wrong.any():
        raise kind(message.replace("{index}", str(index.cpu()[wrong][0].item())))
