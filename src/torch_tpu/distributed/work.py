"""The handle of a collective, and what is said when it does not end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..runtime import client, jax_door
from . import watchdog


class TpuWork(dist._Work):
    """A collective that was launched.

    On virtual chips `wait` blocks until it is done, or its timeout has passed. On TPU chips the program runs in order
    with everything launched later, so `wait` returns at once, as it does on GPUs.
    """

    def __init__(self, group: Any, number: int, doing: str, arrays: Sequence[Any], result: Any,
                 timeout: timedelta) -> None:
        super().__init__()
        self.group, self.number, self.doing = group, number, doing
        self.arrays = list(arrays)
        self.value = result
        self.deadline = time.monotonic() + timeout.total_seconds()
        self.seconds = timeout.total_seconds()
        self.failure: BaseException | None = None
        self.future: Any = None

    def is_completed(self) -> bool:
        return all(array.is_deleted() or array.is_ready() for array in self.arrays)

    def is_success(self) -> bool:
        return self.is_completed() and self.failure is None

    def exception(self) -> Any:
        return self.failure

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.failure is not None:
            raise self.failure
        if not self.arrays or not client.get().platform.virtual:
            self.arrays = []
            return True
        deadline = self.deadline
        seconds = self.seconds
        if timeout.total_seconds() > 0:
            seconds = timeout.total_seconds()
            deadline = time.monotonic() + seconds
        pause = 2e-5
        while not self.is_completed():
            if time.monotonic() > deadline:
                self._fail(f"timed out after {seconds:g} s")
            time.sleep(pause)
            pause = min(pause * 1.2, 2e-3)
        for array in self.arrays:
            if not array.is_deleted():
                try:
                    array.block_until_ready()
                except jax_door.XlaError as error:
                    self._fail(f"failed ({str(error).strip().splitlines()[0]})", error)
        self.arrays = []
        return True

    def _fail(self, how: str, cause: BaseException | None = None) -> None:
        message = self.group.explain(self.number, self.doing, how)
        watchdog.broken()
        self.failure = dist.DistBackendError(message)
        raise self.failure from cause

    def block_current_stream(self) -> None:
        self.wait()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self.value if isinstance(self.value, list) else [self.value]

    def source_rank(self) -> int:
        raise RuntimeError("source_rank is known for a receive only")

    def get_future(self) -> Any:
        if self.future is None:
            self.wait()  # raises here: DistributedDataParallel's C++ reads a future's exception as if it were tensors
            self.future = torch.futures.Future()
            self.future.set_result(self.result())
        return self.future


class HostWork(dist._Work):
    """Work of gloo's. What it gave goes to the device when it is waited for."""

    def __init__(self, inner: Any, failed: Callable[[BaseException], BaseException],
                 after: Callable[[], None] | None = None, result: Any = None,
                 doing: watchdog.Doing | None = None) -> None:
        super().__init__()
        self.doing = doing
        self.inner, self.failed, self.after, self.value = inner, failed, after, result
        self.failure: BaseException | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.failure is not None:
            raise self.failure
        if self.doing is not None:
            watchdog.waits(self.doing)
        try:
            done = self.inner.wait(timeout) if timeout.total_seconds() > 0 else self.inner.wait()
        except RuntimeError as error:
            self.failure = self.failed(error)
            raise self.failure from error
        if self.doing is not None:
            watchdog.waits(None)
        if self.after is not None:
            after, self.after = self.after, None
            after()
        return done

    def is_completed(self) -> bool:
        if self.inner.is_completed():
            self.wait()
            return True
        return False

    def is_success(self) -> bool:
        return self.failure is None and self.inner.is_success()

    def exception(self) -> Any:
        return self.failure or self.inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.inner._source_rank()

    _source_rank = source_rank

    def result(self) -> Any:
        return self.value or []

    def get_future(self) -> Any:
        self.wait()  # raises here: DistributedDataParallel's C++ reads a future's exception as if it were tensors
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


class Several(dist._Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = list(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self.works:
            work.wait(timeout) if timeout.total_seconds() > 0 else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)

    def exception(self) -> Any:
        return next((error for work in self.works if (error := work.exception())), None)
