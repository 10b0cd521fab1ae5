"""A compiled FX graph: device tensors in, device tensors out, one executable for each way its inputs lie in memory.

A graph the table covers is one segment. A node it does not cover runs eagerly (and so may fall back to the CPU,
counted) between two segments.
"""

from __future__ import annotations

import operator
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from ..distributed import graph as collectives
from ..eager import random
from ..lowering import context, promotion, strided
from ..runtime import config, dtypes, executable, transfer
from ..tensor import buffer
from . import bucket, cache_layout, causes, control_flow, lower, rewrite
from .options import Options

Tensor = torch.Tensor
Node = torch.fx.Node


@dataclass
class Bound:
    """An executable with what its outputs mean."""

    program: executable.Executable
    outputs: list[Any]  # per computed output: how to make the torch value
    replays: list[Replay]
    written: list[tuple[int, int]]  # (buffer index, output index)


@dataclass
class Usual:
    """How the inputs of the last call lay in memory, each in a buffer of its own, and the executable for that."""

    bound: Bound
    context: tuple[object, ...]
    kinds: list[buffer.Kind]
    offsets: list[int]


class Segment:
    """A run of nodes that becomes one executable."""

    def __init__(self, nodes: list[Node], inputs: list[Node], outputs: list[Node], name: str, options: Options,
                 cause: str = causes.FIRST) -> None:
        self.nodes = nodes
        self.inputs = inputs
        self.outputs = outputs
        self.name = name
        self.options = options
        self.keys = sum(1 for node in nodes if lower.is_random(node))
        # In graph order: the program's text, and so its key in the disk cache, must not depend on hashes.
        self.mutated = list(dict.fromkeys(lower.argument(node, 0) for node in nodes if lower.is_mutation(node)))
        self.mutated_at = [inputs.index(node) for node in self.mutated]
        self.rows_at = [inputs.index(node) for node in self.mutated if any(rewrite.writes_rows(u) for u in node.users)]
        self.mutations = [node for node in nodes if lower.is_mutation(node)]
        self.material, self.shared = self._share(outputs)
        # What must have a value: the results, and the sizes in the view operators that make the shared ones.
        self.roots = [*self.material, *(n for _, chain in self.shared.values() for step in chain
                                        for n in step.all_input_nodes)]
        # With fixed sizes, Dynamo's guards have checked them; only offsets and memory remain to be compared.
        self.fixed = all(_fixed(node) for node in inputs)
        self.scope = collectives.scope(nodes)
        self.cache: dict[Any, Bound] = {}
        self.cause = cause
        self.usual: Usual | None = None
        self.rows = self._rows() if options.bucketing else None
        self.last: list[Any] = []

    def _share(self, outputs: list[Node]) -> tuple[list[Node], dict[Node, tuple[Node, list[Node]]]]:
        """Which outputs are computed, and which are windows on an input or on another output: those must alias it,
        as in eager mode, and cost no device work."""
        inside = set(self.nodes)
        unmutated = set(self.inputs) - set(self.mutated)
        chains = {node: lower.view_chain(node) for node in outputs}
        users: dict[Node, int] = {}
        for root, _ in chains.values():
            users[root] = users.get(root, 0) + 1
        shared = {node: (root, chain) for node, (root, chain) in chains.items()
                  if chain and (root in unmutated or (root in inside and users[root] > 1))}
        material = [node for node in outputs if node not in shared]
        material += [root for root in dict.fromkeys(root for root, _ in shared.values())
                     if root in inside and root not in material]
        return material, shared

    def _rows(self) -> bucket.Rows | None:
        """The dimension whose size may be rounded up."""
        try:
            if self.mutated or self.shared or self.keys or self.scope is not None:
                raise bucket.Refused("it writes inputs, gives views of them, draws random numbers, or has collectives")
            return bucket.find(self.inputs, self.nodes, self.material)
        except bucket.Refused as why:
            self.cause = f"{self.cause}; not bucketed: {why}"
            if config.logs("compile"):
                print(f"torch_tpu: {self.name} is compiled for each size, since {why}", file=sys.stderr)
            return None

    def __call__(self, values: list[Any]) -> list[Any]:
        """Runs the segment on device tensors and numbers."""
        return self._run(values) if self.rows is None else self._rounded(self.rows, values)

    @torch.no_grad()
    def _rounded(self, rows: bucket.Rows, values: list[Any]) -> list[Any]:
        sizes = {value.shape[at] for value, at in zip(values, rows.inputs) if at is not None}
        size = sizes.pop()
        buckets = self.options.bucketing
        wanted = bucket.rounded(size, buckets if isinstance(buckets, tuple) else ())
        if wanted == size:
            return self._run(values)
        given = [value if at is None else bucket.pad(value, at, wanted) for value, at in zip(values, rows.inputs)]
        for position in rows.numbers:
            given[position] = wanted
        return [value if rows.results.get(node) is None else bucket.cut(value, rows.results[node], size)  # type: ignore
                for node, value in zip(self.outputs, self._run(given))]

    def _run(self, values: list[Any]) -> list[Any]:
        buffers = self._as_before(values)
        if buffers is not None:
            return self._launch(self.usual.bound, values, values, buffers)  # type: ignore[union-attr]
        buffers = []
        memo: dict[int, int] = {}
        key: list[Any] = []
        moved: list[Any] | None = None
        for position, value in enumerate(values):
            if isinstance(value, Tensor):
                held = getattr(value.untyped_storage(), "_tpu_buffer", None)
                if held is None:
                    moved = moved or list(values)
                    moved[position] = value = value.to("tpu")
                    held = buffer.of(value)
                    assert held is not None
                index = memo.get(id(held))
                if index is None:
                    index = memo[id(held)] = len(buffers)
                    buffers.append(held)
                if self.fixed:
                    key.append((index, held.kind, value.storage_offset()))
                else:
                    key.append((index, held.kind, value.storage_offset(), value.shape, value.stride()))
            else:
                key.append(value)
        given, values = values, moved or values
        shared = tuple(position for position in self.mutated_at
                       if (held := buffer.of(values[position])) is not None and held.shared)
        full = (context.key(), shared, *key)
        bound = self.cache.get(full)
        if bound is None:
            if cache_layout.drop_leading_ones(buffer.of(values[position]) for position in self.rows_at):
                return self._run(given)
            cause = self.cause
            if self.cache:
                cause = causes.of_sizes(self.inputs, self.last, key, self.name, len(self.cache))
            bound = self.cache[full] = self._build(values, buffers, memo, cause)
            self.last = key
        if self.fixed and moved is None and not shared and len(buffers) == len(values):
            self.usual = Usual(bound, context.key(), [held.kind for held in buffers],
                               [value.storage_offset() for value in values])
        return self._launch(bound, given, values, buffers)

    def _as_before(self, values: list[Any]) -> list[buffer.Buffer] | None:
        """The buffers of the values if these lie in memory as those of the last call did, which is soon seen."""
        usual = self.usual
        if usual is None:
            return None
        try:
            buffers = [value.untyped_storage()._tpu_buffer for value in values]
        except AttributeError:  # not a tensor, or not on the device
            return None
        same = ([held.kind for held in buffers] == usual.kinds
                and [value.storage_offset() for value in values] == usual.offsets
                and len({*buffers}) == len(buffers) and usual.context == context.key()
                and not any(buffers[position].shared for position in self.mutated_at))
        return buffers if same else None

    def _launch(self, bound: Bound, given: list[Any], values: list[Any], buffers: list[buffer.Buffer]) -> list[Any]:
        """Runs an executable; `values` are the given ones on the device."""
        arrays = [held.array() for held in buffers]
        if self.keys:
            arrays.append(transfer.host_value(random.draw(None, self.keys)))
        if self.scope is None:
            outputs = bound.program(arrays)
        else:
            outputs = collectives.launch(self.scope, self.name, bound.program, arrays)
        for index, position in bound.written:
            buffers[index].rebind(outputs[position])
        if given is not values:
            for position in self.mutated_at:
                if given[position] is not values[position]:  # a CPU tensor, an optimizer's step count for one
                    given[position].copy_(values[position])
        made = dict(zip(self.material, [make(outputs, values) for make in bound.outputs]))
        if bound.replays:
            roots = {**dict(zip(self.inputs, given)), **made}
            for replay in bound.replays:
                made[replay.node] = replay(roots[replay.root])
        return [made[node] for node in self.outputs]

    def _build(self, values: list[Any], buffers: list[buffer.Buffer], memo: dict[int, int], cause: str) -> Bound:
        windows: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                held = buffer.of(value)
                assert held is not None
                view = strided.of(value)
                windows.append((memo[id(held)], view, dtypes.to_numpy(value.dtype)))
            else:
                windows.append(None)
        written_at = {node: windows[position] for node, position in zip(self.mutated, self.mutated_at)}
        makers: list[Any] = []
        replays: list[Replay] = []
        written: list[tuple[int, int]] = []

        @context.program()
        def program(*arrays: Any) -> list[Any]:
            makers.clear()
            replays.clear()
            written.clear()
            keys = arrays[-1] if self.keys else None
            environment: dict[Node, Any] = {}
            for node, value, window in zip(self.inputs, values, windows):
                environment[node] = value if window is None else strided.read(arrays[window[0]], window[1], window[2])
            run = lower.Run(environment, keys, self.scope)
            run.nodes(self.nodes, self.roots)
            results: list[Any] = []
            for node in self.material:
                makers.append(_maker(environment[node], node, results))
            for node, (root, chain) in self.shared.items():
                replays.append(_replay(node, root, chain, environment))
            bases: dict[int, Any] = {}
            for node, (index, view, kind) in written_at.items():
                value = promotion.cast(run.mutations[node], kind)
                bases[index] = strided.write(bases.get(index, arrays[index]), view, value)
            for index, value in bases.items():
                written.append((index, len(results)))
                results.append(value)
            results.extend(collectives.unused(self.scope))
            return results

        avals = [jax.ShapeDtypeStruct(held.shape, held.dtype) for held in buffers]
        if self.keys:
            avals.append(jax.ShapeDtypeStruct((self.keys, 2), np.uint32))
        donate = sorted({index for index, _, _ in written_at.values()
                         if self.options.donate and not buffers[index].shared})
        with context.forced_precision(self.options.precision):
            program_ = executable.build(program, avals, self.name, donate, self.options.xla, graph=True,
                                        replicas=collectives.replicas(self.scope), cause=cause,
                                        pins=lambda: [(position, index) for index, position in written])
        executable.dump(self.name, "fx.txt", "".join(f"{node.format_node()}\n" for node in (*self.inputs, *self.nodes)))
        return Bound(program_, list(makers), list(replays), list(written))


def _fixed(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return not any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
    return not isinstance(value, torch.SymInt)


@dataclass(frozen=True)
class Replay:
    """View operators that make an output from the tensor whose memory it shares, with their arguments at this size."""

    node: Node
    root: Node
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]

    def __call__(self, tensor: Tensor) -> Any:
        value: Any = tensor
        for target, args, kwargs in self.steps:
            value = target(value, *args, **kwargs)
        return value


def _replay(node: Node, root: Node, chain: list[Node], environment: dict[Node, Any]) -> Replay:
    def resolve(value: Any) -> Any:
        return torch.fx.node.map_arg(value, lambda n: environment[n])

    return Replay(node, root, tuple((step.target, tuple(resolve(step.args[1:])), dict(resolve(step.kwargs)))
                                    for step in chain))


def _maker(value: Any, node: Node, results: list[Any]) -> Any:
    """Appends a value to the program's results; returns what turns the outputs into the torch value."""
    if value is None or isinstance(value, int | float | bool | complex | torch.dtype):
        return lambda outputs, values: value
    if isinstance(value, list | tuple):
        parts = [_maker(item, node, results) for item in value]
        kind = type(value) if type(value) in (list, tuple) else tuple
        return lambda outputs, values: kind(part(outputs, values) for part in parts)
    meta = node.meta.get("val")
    sizes = tuple(value.shape)
    strides = buffer.contiguous(sizes)
    on_cpu = False
    if isinstance(meta, Tensor):
        value = promotion.cast(value, meta.dtype)
        on_cpu = meta.device.type == "cpu" and not lower.is_random_state(node)
        wanted = meta.stride()
        if all(isinstance(s, int) for s in wanted) and tuple(wanted) != strides and 0 not in sizes:
            order = buffer.dense_order(sizes, wanted)
            if order is not None:
                strides = tuple(wanted)
                value = value.transpose(order)
    position = len(results)
    results.append(value)
    if on_cpu:
        return lambda outputs, values: transfer.to_host(outputs[position]).as_strided(sizes, strides)
    return lambda outputs, values: buffer.wrap(outputs[position], sizes, strides)


class Graph:
    """A callable over the flat inputs of an AOTAutograd graph."""

    def __init__(self, gm: torch.fx.GraphModule, name: str, options: Options, cause: str = causes.FIRST) -> None:
        self.name = name
        self.cause = cause
        nodes = list(gm.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        output = nodes[-1]
        self.returned = output.args[0]
        self.constants = {node: getattr(gm, node.target) for node in nodes if node.op == "get_attr"}
        self.checks = [node for node in nodes if lower.is_late_check(node)]
        # The token that orders effects, which a check hands on.
        self.tokens = {user: lower.argument(node, 0) for node in self.checks for user in node.users}
        body = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")
                and node not in self.checks and node not in self.tokens]
        self.steps = self._split(body, options)

    def _split(self, body: list[Node], options: Options) -> list[Any]:
        groups: list[tuple[bool, list[Node]]] = []
        place: dict[Node, int] = {}
        eager: list[str] = []
        for node in body:
            compiled = lower.supports(node)
            if node.target is operator.getitem:
                # A part of several results is taken where they are made: inside their segment, or in Python.
                source = place.get(lower.argument(node, 0))
                compiled = source is not None and source == len(groups) - 1 and groups[source][0]
            elif not compiled:
                eager.append(str(node.target))
            if not (compiled and groups and groups[-1][0]):
                groups.append((compiled, []))
            groups[-1][1].append(node)
            place[node] = len(groups) - 1
        if eager:
            warnings.warn(
                f"torch.compile(backend='tpu'): {self.name} is cut into {len(groups)} pieces, since these operators "
                f"have no lowering and run between them: {', '.join(sorted(set(eager)))}", RuntimeWarning, stacklevel=2)
        wanted = set(lower.leaves((self.returned, [node.args[2:] for node in self.checks])))
        steps: list[Any] = []
        for number, (compiled, group) in enumerate(groups):
            if not compiled:
                steps.append(group[0])
                continue
            inside = set(group)
            inputs = list(dict.fromkeys(a for node in group for a in node.all_input_nodes
                                          if a not in inside and control_flow.graph_of(a) is None))
            outputs = [node for node in group
                       if not lower.is_mutation(node) and (node in wanted or any(u not in inside for u in node.users
                                                                                  if u.op != "output"))]
            name = self.name if len(groups) == 1 else f"{self.name}[{number}]"
            steps.append(Segment(group, inputs, outputs, name, options, self.cause))
        return steps

    def __call__(self, *args: Any) -> Any:
        environment: dict[Node, Any] = dict(zip(self.placeholders, args))
        environment.update(self.constants)
        for step in self.steps:
            if isinstance(step, Segment):
                results = step([environment[node] for node in step.inputs])
                environment.update(zip(step.outputs, results))
                for node in step.mutations:
                    environment[node] = environment[lower.mutation_of(node)]
            else:
                environment[step] = lower.run_eagerly(step, environment)
        for node, source in self.tokens.items():
            environment[node] = environment[source]
        for node in self.checks:
            lower.check(node, environment)
        return torch.fx.node.map_arg(self.returned, lambda node: environment[node])
