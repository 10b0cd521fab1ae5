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
    if module is not None and not _importing(module):
        apply(module, [adaptation])
        return
    if module is not None and module.__spec__ is not None:
        _Watched.watch(module, adaptation)
        return
    _finder.wanted.setdefault(name, []).append(adaptation)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _importing(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _Watched(importlib.machinery.ModuleSpec):
    """The spec of a module that was half imported when torch_tpu came (it imports torch itself). Python sets
    `_initializing` to False on it when the module's code has run (tried on 3.11 to 3.13)."""

    @classmethod
    def watch(cls, module: ModuleType, adaptation: Adaptation) -> None:
        spec = module.__spec__
        if not isinstance(spec, cls):
            spec.__class__ = cls  # type: ignore[union-attr, assignment]
            vars(spec)["_watched"] = module, []
        vars(spec)["_watched"][1].append(adaptation)

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        watched = vars(self).pop("_watched", None) if not value else None
        if watched is not None and sys.modules.get(self.name) is watched[0]:  # its code did not fail
            apply(*watched)


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
