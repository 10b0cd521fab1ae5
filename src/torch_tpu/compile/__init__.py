"""The `tpu` backend of torch.compile. Read backend.py, then graph.py, then lower.py."""

from __future__ import annotations

from typing import Any


def tpu(gm: Any, example_inputs: Any, *, mode: str | None = None, options: dict[str, Any] | None = None) -> Any:
    """Dynamo backend `tpu`: one XLA executable a graph.

    Args:
        gm: the FX graph Dynamo captured.
        example_inputs: its fake inputs.
        mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs". XLA has one way to compile,
            so all mean the same; anything else is an error.
        options: see torch_tpu.compile.options.Options.

    Raises:
        CompileOptionError: an unknown mode or option.
    """
    from . import backend

    return backend.compile_graph(gm, example_inputs, mode, options)
