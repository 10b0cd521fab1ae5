"""The one module that asks libtpu's compiler for programs of chips that are not here. It is also the process that does
it: `python libtpu_door.py FOLDER` reads job.json and program.mlir there and writes what came of it. A process of its
own, since the compiler takes gigabytes, may abort, and takes settings from the environment.

Private API of jax/jaxlib 0.10.2, libtpu 0.0.42.1: compile from an MLIR module instead of a JAX function. Imports
nothing of torch_tpu, so that the process starts without torch.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

# No metadata server, no lock of a chip, no log files.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
               "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
               "JAX_ENABLE_COMPILATION_CACHE": "0"}
_MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def devices(grid: str, bounds: tuple[int, ...] | None, config: str, count: int) -> list[Any]:
    """The first devices of a topology.

    Raises:
        RuntimeError: it has fewer.
    """
    from jax.experimental import topologies

    more: dict[str, Any] = {"chip_config_name": config} if config else {}
    if bounds is not None:
        more["chips_per_host_bounds"] = bounds
    found = topologies.get_topology_desc(platform="tpu", topology_name=grid, **more).devices
    if len(found) < count:
        raise RuntimeError(f"libtpu's topology {grid} has {len(found)} devices, {count} are expected")
    return list(found[:count])


def compile_module(text: bytes, chips: list[Any], options: dict[str, Any], free: list[bool]) -> Any:
    """A program of one device, or of several among which XLA divides it."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        settings = compiler.get_compile_options(1, len(chips), device_assignment=np.array([[c.id for c in chips]]),
                                                env_options_overrides=options or None)
        if len(chips) > 1:
            settings.executable_build_options.allow_spmd_sharding_propagation_to_output = free
        return chips[0].client.compile(module, _jax.DeviceList(tuple(chips)), settings)


def facts(executable: Any) -> dict[str, Any]:
    """What the compiler says about a program: bytes of its memory, floating point operations."""
    memory = executable.get_compiled_memory_stats()
    cost = executable.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    found = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in _MEMORY}
    peak = int(getattr(memory, "peak_memory_in_bytes", 0))
    return {**found, "peak": peak, "flops": float(cost.get("flops", 0)),
            "bytes_accessed": float(cost.get("bytes accessed", 0)), "optimal_s": float(cost.get("optimal_seconds", 0))}


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    from jax._src.lib import _jax

    bounds = tuple(job["bounds"]) if job["bounds"] is not None else None
    chips = devices(job["grid"], bounds, job["config"], job["devices"])
    begin = time.perf_counter()
    try:
        executable = compile_module((folder / "program.mlir").read_bytes(), chips, job["options"], job["free"])
    except _jax.JaxRuntimeError as error:
        answer: dict[str, Any] = {"error": str(error), "compile_s": time.perf_counter() - begin}
    else:
        answer = {**facts(executable), "compile_s": time.perf_counter() - begin, "kind": chips[0].device_kind}
        (folder / "program.hlo").write_text(executable.hlo_modules()[0].to_string())
        (folder / "program.executable").write_bytes(executable.serialize())
    answer["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(Path(sys.argv[1]))
