"""Compiles a JAX function for the chip and runs it. Eager operators, compiled graphs and collectives all end here."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import cache, cache_key, client, config, dynamo_door, errors, jax_door, partition


@dataclass
class CompileRecord:
    """One compilation: what, how long each part took in seconds, and where the executable came from."""

    name: str
    trace_s: float
    compile_s: float
    source: str  # "compiled" or "disk"
    cause: str = ""  # of a compiled graph: "first call", or what differs from the compilation before


@dataclass
class Statistics:
    """What this process compiled and launched."""

    compiled: int = 0
    loaded: int = 0
    launches: int = 0
    compile_s: float = 0.0
    trace_s: float = 0.0
    graphs: list[CompileRecord] = field(default_factory=list)


STATISTICS = Statistics()
_counting = threading.Lock()  # operators are compiled by several threads


class Executable:
    """A compiled program over flat lists of JAX arrays."""

    __slots__ = ("_loaded", "_makers", "donates", "name")

    def __init__(self, loaded: Any, makers: list[Any], name: str, donates: bool) -> None:
        self._loaded = loaded
        self._makers = makers
        self.name = name
        self.donates = donates

    def __call__(self, arrays: list[Any]) -> list[Any]:
        if client.forked:
            raise client.fork_error()
        if self.donates and _waiting:
            _waiting[-1]()
        STATISTICS.launches += 1
        try:
            return jax_door.execute(self._loaded, arrays, self._makers)
        except jax_door.XlaError as error:
            raise errors.from_xla(error, f"running {self.name}") from error

    def hlo(self) -> str:
        """The optimised HLO, as text."""
        return self._loaded.get_hlo_text()

    def memory(self) -> Any:
        """XLA's statement of argument, output, alias and temporary bytes."""
        return self._loaded.get_compiled_memory_stats()


class Partitioned(Executable):
    """A program of all chips of the mesh, compiled at its first call for the way its arguments are spread."""

    __slots__ = ("_program",)

    def __init__(self, program: partition.Program, name: str, donates: bool) -> None:
        super().__init__(None, [], name, donates)
        self._program = program

    def __call__(self, arrays: list[Any]) -> list[Any]:
        if client.forked:
            raise client.fork_error()
        if self.donates and _waiting:
            _waiting[-1]()
        STATISTICS.launches += 1
        try:
            return self._program(arrays)
        except jax_door.XlaError as error:
            raise errors.from_xla(error, f"running {self.name}") from error

    def hlo(self) -> str:
        return self._program.ran().get_hlo_text()

    def memory(self) -> Any:
        return self._program.ran().get_compiled_memory_stats()


# What runs the operators that were recorded and still need their arguments' memory, while there are any.
_waiting: list[Callable[[], None]] = []


def wait_for(run: Callable[[], None] | None) -> None:
    """Calls `run` before the next program that takes over the memory of an argument; None when nothing waits."""
    _waiting[:] = [] if run is None else [run]


_dump_to: Path | None = None  # folder for the text of every compiled graph


def dump_to(folder: str | os.PathLike[str] | None) -> None:
    """Writes every graph compiled from now on there, as StableHLO and as optimised HLO; None stops it."""
    global _dump_to
    _dump_to = None if folder is None else Path(folder)
    if _dump_to is not None:
        _dump_to.mkdir(parents=True, exist_ok=True)


def dump(name: str, kind: str, text: str | bytes) -> None:
    """Writes a text of the graph that was compiled last to that folder, if there is one."""
    if _dump_to is not None:
        stem = f"{len(STATISTICS.graphs) - 1:03}-" + re.sub(r"[^\w.-]+", "_", name)
        (_dump_to / f"{stem}.{kind}").write_bytes(text if isinstance(text, bytes) else text.encode())


class _Progress:
    """Says on a terminal what is compiling when it takes longer than a second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.timer: threading.Timer | None = None
        self.shown = False

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            self.timer = threading.Timer(1.0, self._show)
            self.timer.daemon = True
            self.timer.start()
        return self

    def _show(self) -> None:
        self.shown = True
        sys.stderr.write(f"torch_tpu: compiling {self.name} ...\r")
        sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.shown:
            sys.stderr.write("\033[K")
            sys.stderr.flush()


def build(fn: Callable[..., Any], avals: Sequence[Any], name: str, donate: Sequence[int] = (),
          options: dict[str, Any] | None = None, graph: bool = False, replicas: Sequence[Any] = (),
          cause: str = "", pins: Callable[[], Sequence[tuple[int, int]]] | None = None) -> Executable:
    """Traces `fn` over flat arguments and compiles it, or loads it from the disk cache.

    Args:
        fn: takes one JAX value an argument, returns a flat list or tuple of JAX values.
        avals: jax.ShapeDtypeStruct of each argument.
        name: shown in errors and logs.
        donate: positions of arguments whose memory the outputs may take over.
        options: XLA options for this program.
        graph: a compiled graph (as against one eager operator); it is listed in the statistics.
        replicas: the devices of all processes that run the program together, for one with collectives.
        cause: why a graph is compiled, for the statistics.
        pins: gives, once `fn` is traced, (result, argument) of results that go to the memory of an argument.
    """
    recorded = Recorded(fn, avals, name, donate)
    recorded.pins = pins() if pins is not None else None
    return recorded.compile(options, graph, replicas, cause)


def of_module(module: Any, results: Sequence[Any], name: str) -> Executable:
    """Compiles an MLIR module, or loads it from the disk cache.

    Args:
        results: jax.ShapeDtypeStruct of each of its results.
    """
    return _compile(module, results, name, 0.0, False, None, False, (), "")


class Recorded:
    """A function traced over flat arguments, not compiled yet. See `build` for the arguments.

    Attributes:
        jaxpr: what it computes; holds nothing that the function holds.
        results: shapes and dtypes of its flat results.
        pins: which result is written to the memory of which argument, where that is known.
    """

    __slots__ = ("_avals", "_donate", "_name", "_trace_s", "_traced", "jaxpr", "pins", "results")

    def __init__(self, fn: Callable[..., Any], avals: Sequence[Any], name: str, donate: Sequence[int] = ()) -> None:
        begin = time.perf_counter()
        with dynamo_door.untraced():
            self._traced = jax_door.trace(fn, avals, donate)
        self.jaxpr = self._traced.jaxpr
        self.results = jax_door.results(self._traced)
        self._avals, self._name, self._donate = avals, name, donate
        self._trace_s = time.perf_counter() - begin
        self.pins: Sequence[tuple[int, int]] | None = None

    def release(self) -> None:
        """Lets go of the function; compiling it later traces its jaxpr again."""
        self._traced = None

    def compile(self, options: dict[str, Any] | None = None, graph: bool = False,
                replicas: Sequence[Any] = (), cause: str = "") -> Executable:
        if partition.current is not None and not replicas:
            return self._partitioned(options, graph, cause)
        begin = time.perf_counter()
        with dynamo_door.untraced():
            if self._traced is None:
                def program(*arrays: Any) -> list[Any]:
                    return jax_door.replay(self.jaxpr, arrays)

                self._traced = jax_door.trace(program, self._avals, self._donate)
            module = jax_door.lower(self._traced)
        self._traced = None
        self._trace_s += time.perf_counter() - begin
        return _compile(module, self.results, self._name, self._trace_s, bool(self._donate), options, graph, replicas,
                        cause)

    def _partitioned(self, options: dict[str, Any] | None, graph: bool, cause: str) -> Executable:
        name, trace_s, self._traced = self._name, self._trace_s, None

        def obtain(module: Any, xla_options: Any, chips: Sequence[Any]) -> Any:
            device = client.get().device
            return _obtain(module, name, trace_s, xla_options, chips, graph, cause,
                           lambda text: cache_key.key(text, device, options, chips, xla_options))

        program = partition.Program(self.jaxpr, self._avals, self.results, self._donate, self.pins, obtain, options)
        return Partitioned(program, name, bool(self._donate))


def _compile(module: Any, results: Sequence[Any], name: str, trace_s: float, donates: bool,
             options: dict[str, Any] | None, graph: bool, replicas: Sequence[Any],
             cause: str) -> Executable:
    device = client.get().device
    xla_options = jax_door.compile_options(device, options, replicas)
    loaded = _obtain(module, name, trace_s, xla_options, replicas or (device,), graph, cause,
                     lambda text: cache_key.key(text, device, options, replicas))
    return Executable(loaded, jax_door.outputs(results, device), name, donates)


def _obtain(module: Any, name: str, trace_s: float, xla_options: Any, chips: Sequence[Any], graph: bool, cause: str,
            key_of: Callable[[bytes], str]) -> Any:
    """An executable of XLA's, from the disk cache (under `key_of` the module's text) or compiled."""
    device = client.get().device
    begin = time.perf_counter()

    def make() -> Any:
        try:
            with _Progress(name):
                return jax_door.compile_module(module, device, xla_options, chips)
        except jax_door.XlaError as error:
            raise errors.from_xla(error, f"compiling {name}") from error

    def load(payload: bytes) -> Any:
        try:
            return jax_door.load_executable(payload, device, xla_options, chips)
        except jax_door.XlaError as error:
            raise cache.Unusable(f"XLA does not load ({str(error).strip().splitlines()[0]})") from error

    def save(made: Any) -> bytes:
        try:
            return jax_door.save_executable(made)
        except jax_door.XlaError as error:
            raise cache.Unusable(str(error).strip().splitlines()[0]) from error

    disk = cache.disk()
    if disk is None or not disk.usable:
        loaded, kept = make(), False
    else:
        key = key_of(jax_door.module_bytes(module))
        loaded, kept = disk.get_or_make(key, name, cache_key.environment(), load, make, save)
    source = "disk" if kept else "compiled"
    done = time.perf_counter()
    with _counting:
        STATISTICS.loaded += kept
        STATISTICS.compiled += not kept
        STATISTICS.trace_s += trace_s
        STATISTICS.compile_s += done - begin
    if graph:
        STATISTICS.graphs.append(CompileRecord(name, trace_s, done - begin, source, cause))
        if _dump_to is not None:
            dump(name, "stablehlo.mlir", jax_door.module_bytes(module))
            dump(name, "hlo.txt", loaded.get_hlo_text())
    if config.logs("compile"):
        print(f"torch_tpu: {source} {name}: trace {trace_s:.2f} s, XLA {done - begin:.2f} s", file=sys.stderr)
    return loaded
