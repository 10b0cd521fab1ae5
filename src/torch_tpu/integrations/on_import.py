"""Runs an adaptation right after a library's module is imported (or at once, when it already was)."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Adaptation = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """The module's own loader, with the adaptations after it."""

    def __init__(self, loader: Any, adaptations: Sequence[Adaptation]) -> None:
        self.loader = loader
        self.adaptations = adaptations

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        apply(module, self.adaptations)

    def __getattr__(self, name: str) -> Any:  # get_code, get_source, is_package: for inspect and runpy
        return getattr(self.loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Looks only at the modules that have an adaptation."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Adaptation]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        adaptations = self.wanted.pop(name, None)
        if adaptations is None:
            return None
        spec = importlib.util.find_spec(name) if path is None else _search(name, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, adaptations)
        return spec


def _search(name: str, path: Any, target: Any) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


_finder = _Finder()


def after(name: str, adaptation: Adaptation) -> None:
    """Registers an adaptation of the module `name`."""
    module = sys.modules.get(name)
    if module is not None:
        apply(module, [adaptation])
        return
    _finder.wanted.setdefault(name, []).append(adaptation)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def apply(module: ModuleType, adaptations: Sequence[Adaptation]) -> None:
    """Applies adaptations; one that does not fit this version of the library warns and leaves it as it is."""
    for adaptation in adaptations:
        try:
            adaptation(module)
        except (AttributeError, TypeError, ImportError) as error:
            warnings.warn(
                f"torch_tpu: {module.__name__} {getattr(module, '__version__', '')} could not be adapted to the tpu "
                f"device ({error}); it may place things on the CPU. Tell us the library's version.",
                RuntimeWarning, stacklevel=2)
