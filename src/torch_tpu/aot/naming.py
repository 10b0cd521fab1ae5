"""Which module an operator belongs to, while a model's code is captured: forward by the calls of modules, backward by
autograd's sequence numbers, which a node has from the operator that it is the gradient of (torch 2.13)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules import module as hooks


class Names:
    """Names of modules, and the one that runs.

    Args:
        modules: roots; what is in them has their paths ("model.layers.0.mlp"), other modules that of their class.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._names = {id(part): name for root in modules for name, part in root.named_modules()}
        self._running: list[str] = []
        self._forward: dict[int, str] = {}  # by autograd's sequence number

    def current(self) -> str:
        """The module that runs now, or whose gradient is computed; "" outside of all."""
        node: Any = torch._C._current_autograd_node()
        if node is not None and not self._running:
            return self._forward.get(node._sequence_nr(), "")
        name = self._running[-1] if self._running else ""
        if name and torch.is_grad_enabled():
            self._forward[torch.autograd._get_sequence_nr() - 1] = name  # type: ignore[attr-defined]
        return name

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Modules that are called within are noticed."""
        with ExitStack() as stack:
            stack.callback(self._running.clear)
            stack.callback(hooks.register_module_forward_pre_hook(self._enter).remove)
            stack.callback(hooks.register_module_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._running.append(self._names.get(id(module)) or type(module).__name__)

    def _leave(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        self._running.pop()
