"""The options of torch.distributed's collectives (torch 2.13 exports only some of the classes by a public name)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d


def _made(kind: str, timeout: timedelta | None, fields: dict[str, Any]) -> Any:
    options: Any = getattr(c10d, kind)()
    if timeout is not None:
        options.timeout = timeout
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def all_reduce(op: Any = None, timeout: timedelta | None = None) -> Any:
    return _made("AllreduceOptions", timeout, {} if op is None else {"reduceOp": op})


def all_reduce_coalesced() -> Any:
    return _made("AllreduceCoalescedOptions", None, {})


def reduce(op: Any = None, root: int = 0, timeout: timedelta | None = None) -> Any:
    return _made("ReduceOptions", timeout, {"rootRank": root, "rootTensor": 0, **({} if op is None else
                                                                                  {"reduceOp": op})})


def reduce_scatter(op: Any = None, timeout: timedelta | None = None) -> Any:
    return _made("ReduceScatterOptions", timeout, {} if op is None else {"reduceOp": op})


def broadcast(root: int, timeout: timedelta | None = None) -> Any:
    return _made("BroadcastOptions", timeout, {"rootRank": root, "rootTensor": 0})


def all_gather(timeout: timedelta | None = None) -> Any:
    return _made("AllgatherOptions", timeout, {})


def gather(root: int = 0, timeout: timedelta | None = None) -> Any:
    return _made("GatherOptions", timeout, {"rootRank": root})


def scatter(root: int = 0, timeout: timedelta | None = None) -> Any:
    return _made("ScatterOptions", timeout, {"rootRank": root})


def all_to_all(timeout: timedelta | None = None) -> Any:
    return _made("AllToAllOptions", timeout, {})


def barrier(timeout: timedelta | None = None) -> Any:
    return _made("BarrierOptions", timeout, {})
