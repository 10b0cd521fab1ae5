"""torch.compile without a backend name: graphs on the tpu device go to the `tpu` backend, all others to Inductor.

Wraps torch._TorchCompileInductorWrapper (private; tried on torch 2.13.0), which is what the default backend is.
"""

from __future__ import annotations

from typing import Any

import torch


def _on_tpu(gm: torch.fx.GraphModule, inputs: Any) -> bool:
    if any(isinstance(value, torch.Tensor) and value.device.type == "tpu" for value in inputs):
        return True
    for node in gm.graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.Tensor) and value.device.type == "tpu":
            return True
    return False


def install() -> bool:
    """Applies the rule; False when this torch has no such class."""
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is None or getattr(wrapper, "_torch_tpu", False):
        return wrapper is not None
    inductor = wrapper.__call__

    def call(self: Any, model_: Any, inputs_: Any, **kwargs: Any) -> Any:
        if _on_tpu(model_, inputs_):
            from .. import compile as tpu_compile

            return tpu_compile.tpu(model_, inputs_)
        return inductor(self, model_, inputs_, **kwargs)

    wrapper.__call__ = call
    wrapper._torch_tpu = True
    return True
