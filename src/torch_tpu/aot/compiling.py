"""torch_tpu.aot.compile: traces here, compiles in a process of its own, reports."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..compile.step import _training_step
from ..runtime import errors, platform
from ..tensor import buffer
from . import libtpu_door, report, spreading, topology, tracing, weightless
from .report import Report
from .tracing import Program

_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Compiled:
    """A program for a chip.

    Attributes:
        report: what is known about it.
        hlo: the optimised HLO, as text; empty where it does not fit.
        executable: libtpu's serialised executable; empty where it does not fit.
        program: what was compiled.
    """

    report: Report
    hlo: str
    executable: bytes
    program: Program

    def __str__(self) -> str:
        return str(self.report)


def compile(model: Callable[..., Any], example_inputs: Any = (), topology: str = "v5e-1", *, train: bool = False,
            optimizer: Callable[..., Any] | None = None, loss: Callable[..., Any] | None = None, name: str = "",
            tokens: int | None = None, xla: dict[str, Any] | None = None, mesh: Mapping[str, int] | None = None,
            rules: Mapping[str, Any] | None = None) -> Compiled:
    """Compiles a model or a function for a TPU that is not here, with the lowering of compiled programs on the device.

    Nothing is computed and no memory is taken for tensors, so a model on the meta device of any size can be given, and
    what is given stays as it is. libtpu's compiler runs in a process of its own, without a chip and without network.

    Args:
        model: a module, a torch.export.ExportedProgram, or a function of tensors, modules and optimizers (a
            function's closure is not copied: tensors in it must be on the device).
        example_inputs: a tuple of arguments, a dict of keyword arguments, or one tensor; of tensors only shapes,
            strides and dtypes count (fake, meta, CPU or device tensors).
        topology: a generation and a number of chips: "v5e-1", "v5e-4", "v6e-8", "v5p-16". "v7x-1" is one of a v7x
            chip's two devices, larger slices of v7x have both.
        train: compile a training step of the module instead of its forward: forward, backward and optimizer update.
        optimizer: makes the optimizer of parameters, for `train`; torch.optim.AdamW otherwise.
        loss: as for torch.tpu.compile_step.
        tokens: how many tokens a call makes, for tokens/s in the report.
        xla: options of the compiler.
        mesh: for several chips, how they are arranged: `{"tp": 4}`, `{"fsdp": 2, "tp": 4}`, as for torch.tpu.mesh;
            the product is the number of devices. Default: all of them are `tp`.
        rules: layouts of parameters by name, as for torch_tpu.mesh.Mesh.shard.

    Raises:
        CaptureError: the code does what no program can do, or uses an operator that has no lowering.
        RuntimeError: libtpu is not installed, or does not compile the program.
        ValueError: an unknown topology, or a mesh that does not fit it.

    Example:
        >>> from torch_tpu import aot
        >>> made = aot.compile(torch.nn.Linear(1024, 1024, device="meta"), torch.empty(8, 1024), "v5e-1")
        >>> print(made.report)
    """
    chips = _slice(topology)
    program = trace(model, example_inputs, train=train, optimizer=optimizer, loss=loss, name=name,
                    mesh=arranged(chips, mesh), rules=rules)
    return compile_program(program, topology, chips, tokens, xla)


def arranged(chips: topology.Slice, mesh: Mapping[str, int] | None) -> dict[str, int] | None:
    """The mesh over a slice; None for one chip.

    Raises:
        ValueError: its sizes do not make up the slice.
    """
    if chips.devices == 1:
        if mesh and math.prod(mesh.values()) != 1:
            raise ValueError(f"a mesh {dict(mesh)} on {chips.name}, which has one chip; name a larger topology")
        return None
    axes = dict(mesh) if mesh else {"tp": chips.devices}
    if math.prod(axes.values()) != chips.devices:
        raise ValueError(f"a mesh {axes} has {math.prod(axes.values())} devices, {chips.name} has {chips.devices}")
    return axes


def module_of(model: Any) -> Any:
    """A model as what can be called: a torch.export.ExportedProgram is made a module whose constants are on tpu."""
    if isinstance(model, torch.export.ExportedProgram):
        from torch.export.passes import move_to_device_pass

        return move_to_device_pass(model, "tpu").module()
    return model


def trace(model: Callable[..., Any], example_inputs: Any = (), *, train: bool = False,
          optimizer: Callable[..., Any] | None = None, loss: Callable[..., Any] | None = None,
          name: str = "", names: dict[torch.Tensor, str] | None = None, mesh: Mapping[str, int] | None = None,
          rules: Mapping[str, Any] | None = None, caches: Sequence[torch.Tensor] = ()) -> Program:
    """The program of `compile`, not compiled yet. See there for the arguments; `names` are those of device tensors that
    a function has besides, and `caches` those of them that are keys and values."""
    args, kwargs = _arguments(example_inputs)
    model = module_of(model)
    if not isinstance(model, torch.nn.Module) and (train or optimizer or loss):
        raise TypeError("train=, optimizer= and loss= go with a module; a function does its own step")
    if (optimizer or loss) and not train:
        raise TypeError("optimizer= and loss= need train=True")
    copied, args, kwargs = weightless.copy_of((model, args, kwargs))
    held = _names((copied, args, kwargs), names or {})
    spread = _spreading((copied, args, kwargs), mesh, rules, caches) if mesh else None
    name = name or getattr(model, "__name__", type(model).__name__)
    grad: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    function = copied
    if train:
        function = _training_step(copied, (optimizer or torch.optim.AdamW)(copied.parameters()), loss, None)
    elif isinstance(model, torch.nn.Module):
        grad = torch.no_grad()
    with grad:
        return tracing.trace(function, args, kwargs, name, held, _modules((copied, args, kwargs)), spread)


def _spreading(value: Any, mesh: Mapping[str, int], rules: Mapping[str, Any] | None,
               caches: Sequence[torch.Tensor]) -> spreading.Spreading:
    _, args, kwargs = value
    found = spreading.Spreading(mesh, rules)
    for module in _modules(value):
        found.module(module)
    for tensor in caches:
        found.cache(tensor)
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            found.argument(leaf)
    return found


def compile_program(program: Program, name: str, chips: topology.Slice | None = None, tokens: int | None = None,
                    xla: dict[str, Any] | None = None) -> Compiled:
    """Compiles a traced program for a topology."""
    chips = chips or _slice(name)
    if math.prod(program.axes.values()) != chips.devices:
        raise ValueError(f"{program.name} was traced for {math.prod(program.axes.values())} device(s), {name} has "
                         f"{chips.devices}")
    job = {"grid": chips.grid, "bounds": chips.bounds, "config": chips.chip.config, "devices": chips.devices,
           "options": xla or {}, "free": program.free}
    with tempfile.TemporaryDirectory(prefix="torch_tpu-aot-") as folder:
        at = Path(folder)
        (at / "job.json").write_text(json.dumps(job))
        (at / "program.mlir").write_bytes(program.module)
        paths = os.pathsep.join(filter(None, sys.path))  # it finds the same jax and libtpu
        done = subprocess.run([sys.executable, "-P", libtpu_door.__file__, folder], capture_output=True, text=True,
                              timeout=_TIMEOUT_S, env={**os.environ, "PYTHONPATH": paths})
        if done.returncode != 0 or not (at / "answer.json").exists():
            last = "\n".join(done.stderr.strip().splitlines()[-12:])
            raise RuntimeError(f"libtpu's compiler ended with status {done.returncode} on {program.name} for {name}:\n"
                               f"{last}")
        answer = json.loads((at / "answer.json").read_text())
        text, executable = "", b""
        if "error" not in answer:
            text, executable = (at / "program.hlo").read_text(), (at / "program.executable").read_bytes()
        elif "RESOURCE_EXHAUSTED" not in answer["error"]:
            raise errors.from_xla(RuntimeError(answer["error"]), f"compiling {program.name} for {name}")
    return Compiled(report.make(program, name, chips, answer, text, tokens), text, executable, program)


def _slice(name: str) -> topology.Slice:
    chips = topology.parse(name)
    need_libtpu()
    return chips


def need_libtpu() -> None:
    """Raises RuntimeError where the compiler is not installed."""
    if not platform.has_libtpu():
        raise RuntimeError("compiling for TPUs needs libtpu, also where there is no TPU: pip install 'torch_tpu[tpu]' "
                           "(Linux on x86-64)")


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, dict):
        return (), given
    if isinstance(given, tuple | list):
        return tuple(given), {}
    return (given,), {}


def _modules(value: Any) -> list[torch.nn.Module]:
    model, args, kwargs = value
    return [each for each in (model, *args, *kwargs.values()) if isinstance(each, torch.nn.Module)]


def _names(value: Any, more: dict[torch.Tensor, str]) -> dict[int, str]:
    """Names of tensors by the id of their buffers: parameters and buffers of modules, then arguments."""
    _, args, kwargs = value
    found: dict[int, str] = {}
    for module in _modules(value):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found.setdefault(id(buffer.of(tensor)), name)
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "tpu":
            found.setdefault(id(buffer.of(leaf)), "argument " + pytree.keystr(path[1:]).strip("[]'\""))
    found.update((id(buffer.of(tensor)), name) for tensor, name in more.items())
    return found
