"""The process group for tpu tensors. Device collectives are XLA programs (program.py); CPU tensors, barriers and
point-to-point transfers go through gloo."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from ..lowering import collective
from ..runtime import client, transfer
from . import captured, host, program, watchdog
from .agreement import Agreement
from .named import NamedGroup
from .work import TpuWork

Tensor = torch.Tensor
# Typed as Any: torch's stubs of the C++ class lack half of its methods, and state the others too narrowly.
dist: Any = torch.distributed
_OPS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "BAND": "band", "BOR": "bor",
        "BXOR": "bxor"}
_generations: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def _reducer(op: Any) -> str:
    for name, mine in _OPS.items():
        if op == getattr(dist.ReduceOp, name):
            return mine
    raise NotImplementedError(f"tpu: reduce op {op} is not supported; use one of {', '.join(_OPS)}")


def _check_reducible(tensor: Tensor, reducer: str) -> None:
    if reducer in ("band", "bor", "bxor") and (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"tpu: {reducer} needs an integer or bool tensor, got {tensor.dtype}")
    if reducer in ("min", "max") and tensor.is_complex():
        raise TypeError(f"tpu: {reducer} is not defined for {tensor.dtype}")


def _flat(array: Any) -> Any:
    return array.reshape(-1)


class TpuProcessGroup(NamedGroup):
    """Collectives between the chips of several processes.

    Args:
        store: shared by the group's processes.
        rank: this process's number in the group.
        size: how many processes the group has.
        ranks: their numbers in the job.
        timeout: how long a collective may take.
        name: the group's name.
    """

    def __init__(self, store: Any, rank: int, size: int, ranks: Sequence[int], timeout: timedelta, name: str) -> None:
        super().__init__(rank, size, name)
        self.store = store
        self._rank, self._size = rank, size
        self.ranks = tuple(ranks)
        self.timeout = timeout
        # The store outlives a destroyed group of this name: its keys must not be taken for the new one's.
        store = dist.PrefixStore(f"tpu{next(_generations[name])}/", store)
        self.host = host.gloo(dist.PrefixStore("host/", store), rank, size, timeout, self.ranks, name)
        self.agreement = Agreement(dist.PrefixStore("watch/", store), rank, ranks, name)
        self.number = 0

    # What torch.distributed asks of a group

    def _get_backend(self, device: torch.device) -> Any:
        """gloo, for every device: it is what this group has of the kind c10d calls a backend."""
        return self.host._get_backend(torch.device("cpu"))

    def _get_backend_name(self) -> str:
        return "tpu_dist"

    def get_group_store(self) -> Any:
        return self.store

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def _start_coalescing(self, device: torch.device) -> None:
        """Every collective is launched at once: nothing is held back."""

    def _end_coalescing(self, device: torch.device) -> TpuWork:
        return self._done([])

    def shutdown(self) -> None:
        self.host.shutdown()

    def abort(self) -> None:
        self.host.abort()

    def explain(self, number: int, doing: str, how: str) -> str:
        return self.agreement.explain(number, doing, how)

    # How a collective runs

    def _timeout(self, opts: Any) -> timedelta:
        given = getattr(opts, "timeout", None)
        return given if given is not None and given.total_seconds() > 0 else self.timeout

    def _done(self, result: Any) -> TpuWork:
        return TpuWork(self, self.number, "", [], result, self.timeout)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def _launch(self, name: str, body: program.Body, static: tuple[Any, ...], inputs: Sequence[Tensor],
                outputs: Sequence[Tensor], opts: Any, result: Any, extra: Sequence[Any] = (),
                detail: str = "") -> TpuWork:
        """Runs `body` over the inputs' arrays (and `extra` ones); its results are written into the outputs."""
        number = self.next_number()
        timeout = self._timeout(opts)
        sizes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}[{t.numel()}]" for t in inputs)
        doing = f"{name}{detail}({sizes})"
        self.agreement.check(number, doing, timeout.total_seconds())
        if captured.on():
            captured.record(self, name, body, static, inputs, outputs, extra)
            return TpuWork(self, number, doing, [], result, timeout)
        given = [*map(program.dense, inputs), *extra]
        arrays = watchdog.run(self, number, doing, timeout.total_seconds(),
                              lambda: program.run(name, body, static, given, self.ranks))
        if outputs:
            for tensor, array in zip(outputs, arrays):
                program.store(tensor, array)
        return TpuWork(self, number, doing, arrays, result, timeout)

    def _on_host(self, *tensors: Any) -> bool:
        """Whether a collective is about CPU tensors.

        Raises:
            RuntimeError: it mixes devices.
        """
        kinds = {t.device.type for t in tensors}
        if kinds <= {"tpu"}:
            return False
        if kinds == {"cpu"}:
            return True
        raise RuntimeError(f"a collective's tensors must be on one device, got {', '.join(sorted(kinds))}; move them "
                           "with .to('tpu')")

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        opts = opts if opts is not None else dist.AllreduceOptions()
        if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            made = dist.AllreduceOptions()
            made.reduceOp = opts
            opts = made
        if self._on_host(*tensors):
            return self.host.allreduce(tensors, opts)
        return self._all_reduce("all_reduce", tensors, tensors, opts)

    def _all_reduce(self, name: str, tensors: list[Tensor], outputs: list[Tensor], opts: Any) -> TpuWork:
        reducer = _reducer(opts.reduceOp)
        for tensor in tensors:
            _check_reducible(tensor, reducer)

        def body(*values: Any) -> list[Any]:
            *xs, groups = values
            return [collective.all_reduce(x, reducer, groups) for x in xs]

        return self._launch(name, body, (reducer,), tensors, outputs, opts, tensors, detail=f" {reducer}")

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        if self._on_host(*tensors):
            return self.host.allreduce_coalesced(tensors, opts)
        return self._all_reduce("all_reduce", list(tensors), list(tensors), opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        if self._on_host(*tensors):
            return self.host.reduce(tensors, opts)
        outputs = list(tensors) if self._rank == opts.rootRank else []
        return self._all_reduce("reduce", list(tensors), outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        if self._on_host(output, input):
            return self.host._reduce_scatter_base(output, input, opts)
        return self._scatter_sums([output], [input], opts)

    def _scatter_sums(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> TpuWork:
        reducer = _reducer(opts.reduceOp)
        size = self._size
        for output, tensor in zip(outputs, inputs):
            _check_reducible(tensor, reducer)
            self._same_total("reduce_scatter", tensor, output)
        shapes = tuple(tuple(output.shape) for output in outputs)

        def body(*values: Any) -> list[Any]:
            *xs, groups = values
            return [collective.reduce_scatter(x.reshape(size, -1) if x.size else jax_empty(x, size), reducer,
                                              groups).reshape(shape) for x, shape in zip(xs, shapes)]

        return self._launch("reduce_scatter", body, (reducer, shapes), inputs, outputs, opts, outputs,
                            detail=f" {reducer}")

    def _same_total(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            raise ValueError(
                f"{name}: a tensor of {whole.numel()} {whole.dtype} elements does not fit {self._size} ranks with "
                f"{part.numel()} {part.dtype} elements each")

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        if self._on_host(*outputs, *inputs):
            return self.host.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self._scatter_sums(list(outputs), list(inputs), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        output, parts = outputs[0], list(inputs[0])
        if self._on_host(output, *parts):
            return self.host.reduce_scatter(outputs, inputs, opts)
        reducer = _reducer(opts.reduceOp)
        _check_reducible(output, reducer)
        rows, longest = _padded(parts)
        shape = tuple(output.shape)

        def body(x: Any, groups: Any) -> list[Any]:
            mine = collective.reduce_scatter(x, reducer, groups)
            return [mine]

        got = torch.empty(longest, dtype=output.dtype, device="tpu")
        work = self._launch("reduce_scatter", body, (reducer,), [rows], [got], opts, [output], detail=f" {reducer}")
        output.detach().copy_(got[:math.prod(shape)].view(shape))
        return work

    # Exchanges

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        if self._on_host(*tensors):
            return self.host.broadcast(tensors, opts)

        def body(x: Any, is_root: Any, groups: Any) -> list[Any]:
            return [collective.broadcast(x, is_root, groups)]

        flag = transfer.scalar(self._rank == root, np.dtype(np.bool_))
        return self._launch("broadcast", body, (), tensors, tensors, opts, tensors, [flag], f" from {self.ranks[root]}")

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.AllgatherOptions()
        if self._on_host(output, input):
            return self.host._allgather_base(output, input, opts)
        return self._gather_into([output], [input], opts)

    def _gather_into(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> TpuWork:
        for output, tensor in zip(outputs, inputs):
            self._same_total("all_gather", output, tensor)
        shapes = tuple(tuple(output.shape) for output in outputs)

        def body(*values: Any) -> list[Any]:
            *xs, groups = values
            return [collective.all_gather(_flat(x), groups).reshape(shape) for x, shape in zip(xs, shapes)]

        return self._launch("all_gather", body, shapes, inputs, outputs, opts, outputs)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.AllgatherOptions()
        if self._on_host(*outputs, *inputs):
            return self.host.allgather_into_tensor_coalesced(outputs, inputs, opts)
        return self._gather_into(list(outputs), list(inputs), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts if opts is not None else dist.AllgatherOptions()
        parts, mine = list(outputs[0]), inputs[0]
        if self._on_host(mine, *parts):
            return self.host.allgather(outputs, inputs, opts)
        return self._gather("all_gather", parts, mine, [p.numel() for p in parts], opts)

    def _gather(self, name: str, parts: list[Tensor], mine: Tensor, counts: Sequence[int], opts: Any) -> TpuWork:
        """Every rank's elements (which may be of different number) into the parts; no parts: not wanted here."""
        longest = max(counts)
        if mine.numel() > longest:
            raise ValueError(f"{name}: this rank sends {mine.numel()} elements, and the largest output has {longest}")
        sent = mine if mine.numel() == longest else _padded([mine], longest)[0].view(-1)
        shapes = tuple(tuple(part.shape) for part in parts)

        def body(x: Any, groups: Any) -> list[Any]:
            rows = collective.all_gather(_flat(x), groups)
            if not shapes:
                return [rows]
            return [rows[i, :math.prod(shape)].reshape(shape) for i, shape in enumerate(shapes)]

        return self._launch(name, body, shapes, [sent], parts, opts, parts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        works = [self.allgather([parts], [mine], opts) for parts, mine in zip(output_lists, inputs)]
        return works[-1] if len(works) == 1 else host.Several(works)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        parts = list(outputs[0]) if outputs else []
        if self._on_host(inputs[0], *parts):
            return self.host.gather(outputs, inputs, opts)
        return self._gather("gather", parts, inputs[0], [inputs[0].numel()], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        output = outputs[0]
        parts = list(inputs[0]) if inputs else []
        if self._on_host(output, *parts):
            return self.host.scatter(outputs, inputs, opts)
        root, shape = opts.rootRank, tuple(output.shape)
        rows = torch.stack([part.reshape(-1) for part in parts]) if parts else torch.zeros(
            self._size, output.numel(), dtype=output.dtype, device="tpu")

        def body(x: Any, groups: Any) -> list[Any]:
            return [collective.all_to_all(x, groups)[root].reshape(shape)]

        return self._launch("scatter", body, (root, shape), [rows], [output], opts, [output],
                            detail=f" from {self.ranks[root]}")

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any,
                      opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.AllToAllOptions()
        if self._on_host(output, input):
            return self.host.alltoall_base(output, input, output_splits, input_splits, opts)
        size = self._size
        if not output_splits and not input_splits:
            if input.numel() != output.numel() or (input.dim() and input.shape[0] % size):
                raise ValueError(f"all_to_all: {tuple(input.shape)} cannot be divided among {size} ranks into "
                                 f"{tuple(output.shape)}")
            shape = tuple(output.shape)

            def body(x: Any, groups: Any) -> list[Any]:
                return [collective.all_to_all(x.reshape(size, -1), groups).reshape(shape) if x.size else
                        x.reshape(shape)]

            return self._launch("all_to_all", body, shape, [input], [output], opts, [output])
        outs = output.split(list(output_splits)) if output_splits else output.chunk(size)
        ins = input.split(list(input_splits)) if input_splits else input.chunk(size)
        return self._exchange(list(outs), list(ins), opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else dist.AllToAllOptions()
        if self._on_host(*outputs, *inputs):
            return host.alltoall(self.host, outputs, inputs, opts)
        return self._exchange(list(outputs), list(inputs), opts)

    def _exchange(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> TpuWork:
        """Pieces of different sizes: padded to the largest one that any rank sends."""
        largest = torch.tensor([max(t.numel() for t in inputs)])
        maximum = dist.AllreduceOptions()
        maximum.reduceOp = dist.ReduceOp.MAX
        self.host.allreduce([largest], maximum).wait()
        rows, longest = _padded(inputs, int(largest.item()))
        got = torch.empty(self._size, longest, dtype=rows.dtype, device="tpu")

        def body(x: Any, groups: Any) -> list[Any]:
            return [collective.all_to_all(x, groups)]

        work = self._launch("all_to_all", body, (), [rows], [got], opts, outputs)
        with torch.no_grad():
            for row, output in zip(got, outputs):
                if output.numel():
                    output.detach().copy_(row[:output.numel()].view(output.shape))
        return work

    # Through the host

    def barrier(self, opts: Any = None) -> Any:
        client.synchronize()
        opts = dist.BarrierOptions() if opts is None else opts
        plain = dist.BarrierOptions()  # gloo would take the device named in the caller's for its own
        plain.timeout = self._timeout(opts)
        return host.watch(self, "barrier", lambda: self.host.barrier(plain))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        client.synchronize()
        self.host.monitored_barrier(timeout or self.timeout, wait_all_ranks)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        return host.send(self, tensors, destination, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return host.receive(self, tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return host.receive(self, tensors, None, tag)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def jax_empty(x: Any, size: int) -> Any:
    """An array without elements, with one row a rank."""
    return x.reshape(size, 0)


def _padded(parts: list[Tensor], longest: int | None = None) -> tuple[Tensor, int]:
    """The flattened parts as rows, with zeros after the shorter ones."""
    longest = max(p.numel() for p in parts) if longest is None else longest
    rows = [torch.nn.functional.pad(p.detach().reshape(-1), (0, longest - p.numel())) for p in parts]
    return torch.stack(rows), longest

