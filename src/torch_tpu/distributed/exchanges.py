"""Collectives that move tpu tensors as they are: broadcast, gathers, scatter and all_to_all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..lowering import collective
from ..runtime import transfer
from . import host, host_memory, options
from .launching import Call, Tensor, padded
from .reductions import Reductions
from .work import Several


class Exchanges(Reductions):
    """The exchanges of a process group."""

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        if self.on_host(*tensors):
            return self.host.broadcast(tensors, opts)
        call = self.call(f"broadcast from {self.ranks[root]}", tensors, opts)
        if host_memory.carries(tensors):
            return self.carry(call, host_memory.broadcast(root), tensors, tensors, tensors)

        def body(*values: Any) -> list[Any]:
            *xs, is_root, groups = values
            return [collective.broadcast(x, is_root, groups) for x in xs]

        flag = transfer.scalar(self._rank == root, np.dtype(np.bool_))
        return self.execute(call, "broadcast", body, (), tensors, tensors, tensors, [flag])

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.all_gather()
        if self.on_host(output, input):
            return self.host._allgather_base(output, input, opts)
        return self._gather_into([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.all_gather()
        if self.on_host(*outputs, *inputs):
            return self.host.allgather_into_tensor_coalesced(outputs, inputs, opts)
        return self._gather_into(list(outputs), list(inputs), opts)

    def _gather_into(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        for output, tensor in zip(outputs, inputs):
            self.same_total("all_gather", output, tensor)
        call = self.call("all_gather", inputs, opts)
        shapes = tuple(tuple(output.shape) for output in outputs)
        if host_memory.carries(inputs):
            return self.carry(call, host_memory.all_gather(shapes), inputs, outputs, outputs)

        def body(*values: Any) -> list[Any]:
            *xs, groups = values
            return [collective.all_gather(x.reshape(-1), groups).reshape(shape) for x, shape in zip(xs, shapes)]

        return self.execute(call, "all_gather", body, shapes, inputs, outputs, outputs)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts if opts is not None else options.all_gather()
        parts, mine = list(outputs[0]), inputs[0]
        if self.on_host(mine, *parts):
            return self.host.allgather(outputs, inputs, opts)
        longest = max(part.numel() for part in parts)
        if len(parts) != self._size or mine.numel() > longest:
            raise ValueError(f"all_gather: this rank sends {mine.numel()} elements and takes {len(parts)} tensors of "
                             f"at most {longest}; it needs one of the right size for each of {self._size} ranks")
        sent = mine if mine.numel() == longest else padded([mine], longest)[0].view(-1)
        return self._gather("all_gather list", parts, sent, opts)

    def _gather(self, name: str, parts: list[Tensor], sent: Tensor, opts: Any) -> Any:
        """What every rank sends (of the same number of elements), and the starts of it into the parts."""
        call = self.call(name, [sent], opts)
        shapes = tuple(tuple(part.shape) for part in parts)
        if host_memory.carries([sent]):
            return self.carry(call, host_memory.gather_list(shapes), [sent], parts, parts)

        def body(x: Any, groups: Any) -> list[Any]:
            rows = collective.all_gather(x.reshape(-1), groups)
            if not shapes:
                return [rows]
            return [rows[i, :math.prod(shape)].reshape(shape) for i, shape in enumerate(shapes)]

        return self.execute(call, name, body, shapes, [sent], parts, parts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        works = [self.allgather([parts], [mine], opts) for parts, mine in zip(output_lists, inputs)]
        return works[-1] if len(works) == 1 else Several(works)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.gather()
        parts, mine = list(outputs[0]) if outputs else [], inputs[0]
        if self.on_host(mine, *parts):
            return self.host.gather(outputs, inputs, opts)
        if any(part.numel() != mine.numel() for part in parts):
            raise ValueError(f"gather: this rank sends {mine.numel()} elements, and takes tensors of "
                             f"{[part.numel() for part in parts]}; all must be the same")
        name = f"gather to {self.ranks[opts.rootRank]}"
        if not host_memory.carries([mine]):
            return self._gather(name, parts, mine, opts)
        return self.carry(self.call(name, [mine], opts), host_memory.gather(opts.rootRank), [mine], parts, parts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.scatter()
        output = outputs[0]
        parts = list(inputs[0]) if inputs else []
        if self.on_host(output, *parts):
            return self.host.scatter(outputs, inputs, opts)
        root, shape = opts.rootRank, tuple(output.shape)
        if any(part.numel() != output.numel() or part.dtype != output.dtype for part in parts):
            raise ValueError(f"scatter: the parts have {[part.numel() for part in parts]} elements, and the output "
                             f"{output.numel()} of {output.dtype}; all must be the same")
        call = self.call(f"scatter from {self.ranks[root]}", [output], opts)
        if host_memory.carries([output]):
            return self.carry(call, host_memory.scatter(root, output), parts, [output], [output])
        rows = torch.stack([part.reshape(-1) for part in parts]) if parts else torch.zeros(
            self._size, output.numel(), dtype=output.dtype, device="tpu")

        def body(x: Any, groups: Any) -> list[Any]:
            return [collective.all_to_all(x, groups)[root].reshape(shape)]

        return self.execute(call, "scatter", body, (root, shape), [rows], [output], [output])

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any,
                      opts: Any = None) -> Any:
        opts = opts if opts is not None else options.all_to_all()
        if self.on_host(output, input):
            return self.host.alltoall_base(output, input, output_splits, input_splits, opts)
        size = self._size
        if not output_splits and not input_splits:
            if input.numel() != output.numel() or (input.dim() and input.shape[0] % size):
                raise ValueError(f"all_to_all: {tuple(input.shape)} cannot be divided among {size} ranks into "
                                 f"{tuple(output.shape)}")
            call = self.call("all_to_all", [input], opts)
            shape = tuple(output.shape)
            if host_memory.carries([input]):
                return self.carry(call, host_memory.all_to_all(shape), [input], [output], [output])

            def body(x: Any, groups: Any) -> list[Any]:
                return [collective.all_to_all(x.reshape(size, x.size // size), groups).reshape(shape)]

            return self.execute(call, "all_to_all", body, shape, [input], [output], [output])
        outs = output.split(list(output_splits)) if output_splits else output.chunk(size)
        ins = input.split(list(input_splits)) if input_splits else input.chunk(size)
        return self._exchange(list(outs), list(ins), opts, output, input)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts if opts is not None else options.all_to_all()
        if self.on_host(*outputs, *inputs):
            return host.alltoall(self.host, outputs, inputs, opts)
        return self._exchange(list(outputs), list(inputs), opts)

    def _exchange(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, whole_output: Tensor | None = None,
                  whole_input: Tensor | None = None) -> Any:
        """Pieces of different sizes, which are parts of one tensor or tensors of their own."""
        kinds = {str(t.dtype)[6:] for t in (*outputs, *inputs)}
        if len(kinds) > 1 or len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(f"all_to_all: {len(inputs)} inputs and {len(outputs)} outputs of {', '.join(kinds)} for "
                             f"{self._size} ranks; give one of each for every rank, of one dtype")
        call = self.call(f"all_to_all of {kinds.pop()} pieces", [], opts)
        largest = self._compare_pieces(call, outputs, inputs)
        if largest == 0:
            return self.done(outputs)
        if host_memory.on():
            sent = whole_input if whole_input is not None else torch.cat([t.detach().reshape(-1) for t in inputs])
            results = [whole_output] if whole_output is not None else outputs
            carrier = host_memory.uneven([t.numel() for t in outputs], [t.numel() for t in inputs],
                                         [tuple(t.shape) for t in results])
            return self.carry(call, carrier, [sent], results, outputs)
        rows, longest = padded(inputs, largest)
        received = torch.empty(self._size, longest, dtype=rows.dtype, device="tpu")

        def body(x: Any, groups: Any) -> list[Any]:
            return [collective.all_to_all(x, groups)]

        work = self.execute(call, "all_to_all", body, (), [rows], [received], outputs)
        with torch.no_grad():
            for row, output in zip(received, outputs):
                if output.numel():
                    output.detach().copy_(row[:output.numel()].view(output.shape))
        return work

    def _compare_pieces(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        """The number of elements of the largest piece that any rank sends.

        Raises:
            ValueError: on every rank, where one sends another number of elements than the other expects.
        """
        mine = torch.tensor([[t.numel() for t in inputs], [t.numel() for t in outputs]])
        everyone = torch.empty(self._size, 2, self._size, dtype=torch.int64)
        gathering = options.all_gather(call.timeout)
        host.watch(self, call.doing, lambda: self.gloo._allgather_base(everyone.view(-1), mine.view(-1), gathering),
                   number=call.number, seconds=call.timeout.total_seconds()).wait()
        sent, expected = everyone[:, 0], everyone[:, 1].T
        wrong = (sent != expected).nonzero().tolist()
        if wrong:
            source, target = wrong[0]
            raise ValueError(f"all_to_all: rank {self.ranks[source]} sends {int(sent[source, target])} elements to "
                             f"rank {self.ranks[target]}, which expects {int(expected[source, target])}")
        return int(sent.max())

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base
