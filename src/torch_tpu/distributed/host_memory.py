"""Eager collectives of virtual chips: torch's gloo, over the memory of the arrays. XLA:CPU's own collectives go through
gloo too, with a thread and two copies more. What gloo lacks (a dtype, a reduction, pieces of different sizes) and
everything on TPU chips runs as an XLA program (program.py).

Arrays are read where they are. Results are new memory, which becomes the tensor's array when the work is waited for:
programs that were launched before may still read the old one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..runtime import client, config, jax_door
from . import captured, host, options, program
from .work import HostWork, Several

Tensor = torch.Tensor
# Given gloo, what each tensor holds, and the timeout: a work, and CPU tensors with the results once it is done.
Carrier = Callable[[Any, list[Tensor], timedelta], tuple[Any, list[Tensor]]]

_KINDS = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32,
          torch.int64}
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}


def on() -> bool:
    """Whether gloo takes collectives of device tensors, unless they become part of a program."""
    if captured.on():
        return False
    return client.get().platform.virtual and config.EAGER_COLLECTIVES.choice("gloo", "program") == "gloo"


def carries(tensors: Sequence[Tensor]) -> bool:
    """Whether it takes these. (It refuses tensors without elements.)"""
    return on() and all(tensor.numel() for tensor in tensors)


def reduces(tensors: Sequence[Tensor], reducer: str) -> bool:
    """Whether gloo has the reduction for these dtypes, with XLA's results."""
    kinds = {tensor.dtype for tensor in tensors}
    return kinds <= _KINDS and (reducer != "avg" or all(kind.is_floating_point for kind in kinds))


def launch(group: Any, number: int, doing: str, timeout: timedelta, carrier: Carrier, inputs: Sequence[Tensor],
           outputs: Sequence[Tensor], result: Any) -> HostWork:
    """Runs the carrier over the inputs' memory; its results become the outputs when the work is waited for."""
    seen = [_view(tensor) for tensor in inputs]
    made: list[Tensor] = []

    def start() -> Any:
        work, results = carrier(group.gloo, seen, timeout)
        made.extend(results)
        return work

    def deliver() -> None:
        device = client.get().device
        for tensor, value in zip(outputs, made):
            if not value.numel():
                continue
            array = jax_door.import_dlpack(torch.utils.dlpack.to_dlpack(value), device)
            program.store(tensor, array)

    return host.watch(group, doing, start, deliver, result, number=number, seconds=timeout.total_seconds())


def _view(tensor: Tensor) -> Tensor:
    """A CPU tensor on the memory that holds the tensor's values, which must not be written."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    array = program.dense(tensor)
    array.block_until_ready()
    return torch.utils.dlpack.from_dlpack(jax_door.export_dlpack(array)).view(tensor.dtype)


def _together(works: list[Any]) -> Any:
    return works[0] if len(works) == 1 else Several(works)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def reduce(reducer: str, root: int | None = None) -> Carrier:
    """all_reduce; a reduce whose results are right on one rank only where `root` names it."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        op = _OPS[reducer]
        given = options.all_reduce(op, timeout) if root is None else options.reduce(op, root, timeout)
        copies = [tensor.clone() for tensor in inputs]
        start = gloo.allreduce if root is None else gloo.reduce
        work = _together([start([copy], given) for copy in copies])
        return _averaged(work, copies, reducer, gloo.size()), copies

    return carrier


def _averaged(work: Any, totals: list[Tensor], reducer: str, size: int) -> Any:
    if reducer != "avg":
        return work

    def divide() -> None:
        for total in totals:
            total.div_(size)

    return HostWork(work, lambda error: error, divide)


def reduce_scatter(reducer: str, shapes: Sequence[tuple[int, ...]]) -> Carrier:
    """Each input is one row a rank."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        given = options.reduce_scatter(_OPS[reducer], timeout)
        made = [torch.empty(math.prod(shape), dtype=tensor.dtype) for tensor, shape in zip(inputs, shapes)]
        work = _together([gloo._reduce_scatter_base(row, tensor.reshape(-1), given)
                          for row, tensor in zip(made, inputs)])
        return _averaged(work, made, reducer, gloo.size()), [row.view(shape) for row, shape in zip(made, shapes)]

    return carrier


def broadcast(root: int) -> Carrier:
    """The root's inputs; no results there, since it has them."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        given = options.broadcast(root, timeout)
        made = [] if gloo.rank() == root else [torch.empty_like(tensor) for tensor in inputs]
        return _together([gloo.broadcast([_bytes(tensor)], given) for tensor in made or inputs]), made

    return carrier


def all_gather(shapes: Sequence[tuple[int, ...]]) -> Carrier:
    """Each result is the stacked inputs of all ranks, in the given shape."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        given = options.all_gather(timeout)
        made = [torch.empty(shape, dtype=tensor.dtype) for tensor, shape in zip(inputs, shapes)]
        return _together([gloo._allgather_base(_bytes(whole), _bytes(tensor), given)
                          for whole, tensor in zip(made, inputs)]), made

    return carrier


def gather_list(shapes: Sequence[tuple[int, ...]]) -> Carrier:
    """The starts of the inputs of all ranks, in the given shapes."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        work, (rows,) = all_gather([(gloo.size(), inputs[0].numel())])(gloo, inputs, timeout)
        return work, [row[:math.prod(shape)].view(shape) for row, shape in zip(rows, shapes)]

    return carrier


def gather(root: int) -> Carrier:
    """The root's results are the inputs of all ranks."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        here = range(gloo.size()) if gloo.rank() == root else ()
        made = [torch.empty_like(inputs[0]) for _ in here]
        return gloo.gather([[_bytes(part) for part in made]] if made else [], [_bytes(inputs[0])],
                           options.gather(root, timeout)), made

    return carrier


def scatter(root: int, like: Tensor) -> Carrier:
    """The root's inputs go to the ranks, one to each."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        made = torch.empty(like.shape, dtype=like.dtype)
        given = [[_bytes(part) for part in inputs]] if gloo.rank() == root else []
        return gloo.scatter([_bytes(made)], given, options.scatter(root, timeout)), [made]

    return carrier


def all_to_all(shape: tuple[int, ...]) -> Carrier:
    """One input and one result, each a piece of the same size for every rank."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        made = torch.empty(shape, dtype=inputs[0].dtype)
        return gloo.alltoall_base(_bytes(made), _bytes(inputs[0]), [], [], options.all_to_all(timeout)), [made]

    return carrier


def uneven(received: Sequence[int], sent: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Carrier:
    """all_to_all of one input that is cut into `sent` elements for each rank. The results are one whole, or a piece
    from each rank, in the given shapes."""
    def carrier(gloo: Any, inputs: list[Tensor], timeout: timedelta) -> tuple[Any, list[Tensor]]:
        kind = inputs[0].dtype
        made = torch.empty(sum(received), dtype=kind)
        work = gloo.alltoall_base(_bytes(made), _bytes(inputs[0]), [n * kind.itemsize for n in received],
                                  [n * kind.itemsize for n in sent], options.all_to_all(timeout))
        pieces = [made] if len(shapes) == 1 else made.split(list(received))
        return work, [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    return carrier
