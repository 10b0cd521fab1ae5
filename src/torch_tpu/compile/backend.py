"""From Dynamo's graph to compiled programs, through AOTAutograd: forward, backward and inference alike."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ..eager import dispatcher
from ..lowering.table import TABLE
from . import causes
from . import options as compile_options
from .graph import Graph

_counter = itertools.count()


def compile_graph(gm: torch.fx.GraphModule, example_inputs: Any, mode: str | None,
                  options: dict[str, Any] | None) -> Any:
    """Compiles a graph Dynamo captured. See torch_tpu.compile.tpu."""
    chosen = compile_options.parse(mode, options)
    dispatcher.load()
    name = chosen.name or f"graph{next(_counter)}"
    cause = causes.of_graph(gm, name)

    def compiler(part: str) -> Any:
        def compile_part(graph_module: torch.fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(Graph(graph_module, f"{name}.{part}" if part else name, chosen, cause))
        return compile_part

    return aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler(""),
        decompositions=decompositions(), partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True)(gm, example_inputs)


@functools.cache
def decompositions() -> dict[Any, Any]:
    """torch's decompositions of what the table lacks; what the table has stays whole."""
    from ..eager import fallback

    table = fallback.decompositions()
    return {op: fn for op, fn in table.items() if str(op) not in TABLE and isinstance(op, torch._ops.OpOverload)}
