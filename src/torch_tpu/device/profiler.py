"""torch.tpu.profiler: a trace of what the chip and the host did, with the names of the model's modules.

    with torch.tpu.profiler.trace("traces"):
        model(x)

JAX's profiler writes it (tried on jax 0.10.2): `*.xplane.pb` for TensorBoard's profile plugin, `*.trace.json.gz` for
ui.perfetto.dev.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as _hooks

__all__ = ["trace"]


class _Names:
    """Opens an annotation for each module that runs; its name is the path from the module that was called first."""

    def __init__(self) -> None:
        self.paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self.open: list[tuple[torch.nn.Module, Any]] = []

    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        import jax

        if torch.compiler.is_compiling():
            return
        if module not in self.paths:
            root = type(module).__name__
            for path, part in module.named_modules():
                self.paths.setdefault(part, f"{root}.{path}" if path else root)
        annotation = jax.profiler.TraceAnnotation(self.paths[module])
        annotation.__enter__()
        self.open.append((module, annotation))

    def leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not any(opened is module for opened, _ in self.open):
            return
        while self.open:  # modules whose forward raised are closed with the one around them
            opened, annotation = self.open.pop()
            annotation.__exit__(None, None, None)
            if opened is module:
                return

    def close(self) -> None:
        while self.open:
            self.open.pop()[1].__exit__(None, None, None)


@contextmanager
def trace(folder: str | os.PathLike[str], *, modules: bool = True, python: bool = False) -> Iterator[Path]:
    """Records everything that runs inside, and writes it when it ends.

    The names of modules are on the host's line, around the programs that their operators launch. Code that is compiled
    or captured has no modules left to call: there the programs' own operations are seen.

    Args:
        folder: where the trace goes, in `plugins/profile/<time>/`; made if it is not there.
        modules: annotates the modules' forward calls.
        python: records every Python call too, which is slow and makes large files.

    Yields:
        The folder.

    Raises:
        RuntimeError: a trace is being recorded already.
    """
    import jax

    from . import module as tpu

    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python)
    tpu.init()
    try:
        jax.profiler.start_trace(str(where), profiler_options=options)
    except RuntimeError as error:
        raise RuntimeError("torch.tpu.profiler.trace: a trace is being recorded already; end it first") from error
    names = _Names()
    advice = warnings.catch_warnings()
    advice.__enter__()
    warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")  # ours only name it
    handles = [] if not modules else [_hooks.register_module_forward_pre_hook(names.enter),
                                      _hooks.register_module_forward_hook(names.leave)]
    try:
        yield where
        tpu.synchronize()
    finally:
        for handle in handles:
            handle.remove()
        names.close()
        advice.__exit__(None, None, None)
        jax.profiler.stop_trace()
