"""When a result of the device equals the CPU's: dtype, shape, device, and values within a stated tolerance."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

# Forward tolerances (relative, absolute) per dtype; a gradient, which adds up more terms, is allowed ten times as much.
TOLERANCES = {"float16": (2e-3, 2e-3), "bfloat16": (1.6e-2, 1e-2), "float32": (2e-5, 1e-5), "float64": (1e-7, 1e-7),
              "complex64": (2e-5, 1e-5), "complex128": (1e-7, 1e-7)}
# The next wider dtype, in which both are judged when they differ: whoever is as near to it as the CPU is right.
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64,
         torch.complex64: torch.complex128}


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def to_device(value: Any) -> Any:
    """A sample with its tensors (as the same windows on whole storages) and devices on the chip."""

    def move(leaf: torch.Tensor) -> torch.Tensor:
        plain = leaf.detach()
        if plain.layout != torch.strided:
            return plain.to("tpu").requires_grad_(leaf.requires_grad)
        whole = plain.untyped_storage().nbytes() // plain.element_size()
        dense = whole == plain.numel() and plain.is_contiguous()
        if dense or plain.is_conj() or plain.is_neg():
            moved = plain.to("tpu")
        else:
            base = torch.as_strided(plain, (whole,), (1,), 0).to("tpu")
            moved = torch.as_strided(base, plain.shape, plain.stride(), plain.storage_offset())
        return moved.requires_grad_(leaf.requires_grad)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return move(leaf)
        return "tpu" if isinstance(leaf, torch.device) or leaf in ("cpu", "cpu:0") else leaf

    return pytree.tree_map(lambda x: one(x) if isinstance(x, torch.Tensor | torch.device | str) else x, value)


def widened(value: Any) -> Any:
    """Tensors and dtypes of a sample one width up, holding the same numbers."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(WIDER[leaf.dtype]).requires_grad_(leaf.requires_grad) \
                if leaf.dtype in WIDER else leaf
        return WIDER.get(leaf, leaf)

    return pytree.tree_map(lambda x: widen(x) if isinstance(x, torch.Tensor | torch.dtype) else x, value)


def as_near(want: Any, got: Any, exact: Any) -> bool:
    """Whether results that differ from the CPU's are, taken whole, as near to the wider result as the CPU's are."""
    judged = False
    for w, g, e in zip(tensors(want), tensors(got), tensors(exact)):
        if w.dtype not in WIDER or not w.numel():
            continue
        ours, theirs, size = ((t.detach().cpu().to(e.dtype) - o).abs().nan_to_num(0, 0).amax()
                              for t, o in ((g, e), (w, e), (e.detach(), 0)))
        judged = True
        if not bool(ours <= 2 * theirs + 8 * torch.finfo(w.dtype).eps * size):
            return False
    return judged


def equal(want: Any, got: Any, name: str, scale: float, dtype: str, values: bool, ties: bool = False) -> None:
    """Raises AssertionError for the first difference."""
    wanted, gotten = pytree.tree_leaves(want), pytree.tree_leaves(got)
    if len(wanted) != len(gotten):
        raise AssertionError(f"{len(gotten)} results instead of {len(wanted)}")
    for w, g in zip(wanted, gotten):
        if not isinstance(w, torch.Tensor):
            if values and w != g and not (w != w and g != g) and not isinstance(w, torch.device):
                raise AssertionError(f"{name}: {g!r} instead of {w!r}")
            continue
        if w.dtype != g.dtype or w.shape != g.shape:
            raise AssertionError(f"{name}: {g.dtype} {tuple(g.shape)} instead of {w.dtype} {tuple(w.shape)}")
        if g.device.type != "tpu":
            raise AssertionError(f"{name}: the result is on {g.device}")
        if values and not (ties and w.dtype == torch.int64 and (len(wanted) == 1 or w is not wanted[0])):
            kind = str(w.dtype).removeprefix("torch.")
            rtol, atol = TOLERANCES.get(kind, (0.0, 0.0))
            if dtype in ("bfloat16", "float16") and kind in TOLERANCES:  # a wider result of narrow inputs
                rtol, atol = max(rtol, TOLERANCES[dtype][0]), max(atol, TOLERANCES[dtype][1])
            torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=rtol * scale, atol=atol * scale,
                                       equal_nan=True)
