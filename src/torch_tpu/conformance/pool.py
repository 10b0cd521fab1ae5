"""The parent: hands operators to worker processes; one that dies or overruns costs one operator and is replaced."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

Answers = list[dict[str, Any]]


class Worker:
    """A subprocess, and what it is busy with."""

    START_S = 300
    # Tens of thousands of small programs would push the user's own out of the disk cache.
    ENVIRONMENT: ClassVar[dict[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_TPU_CACHE": "off",
                                            "TORCH_TPU_HOST_INTEGERS": "off"}

    def __init__(self, dtypes: Sequence[str], samples: int) -> None:
        command = [sys.executable, "-m", "torch_tpu.conformance.worker", ",".join(dtypes), str(samples)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env={**self.ENVIRONMENT, **os.environ})
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.operator: int | None = None
        self.answers: Answers = []
        self.ready = False
        self.deadline = time.monotonic() + self.START_S
        self.held = b""

    def lines(self) -> Iterator[str]:
        """Raises EOFError when the process has ended."""
        data = os.read(self.output.fileno(), 1 << 20)
        if not data:
            raise EOFError
        self.held += data
        *whole, self.held = self.held.split(b"\n")
        return iter([line.decode() for line in whole])

    def give(self, operator: int, seconds: float) -> None:
        assert self.process.stdin is not None
        self.operator, self.answers, self.deadline = operator, [], time.monotonic() + seconds
        self.process.stdin.write(f"{operator}\n".encode())
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run(todo: Sequence[int], dtypes: Sequence[str], samples: int, jobs: int, seconds: float,
        done: Callable[[int, Answers], None]) -> None:
    """Calls `done(operator, answers)` for each operator in `todo`.

    Args:
        todo: positions in the database.
        dtypes: names of dtypes.
        samples: at most this many an operator and dtype.
        jobs: worker processes.
        seconds: how long one operator may take.
        done: gets the answers, one a dtype.
    """
    queue = list(reversed(todo))
    selector = selectors.DefaultSelector()

    def start() -> None:
        fresh = Worker(dtypes, samples)
        selector.register(fresh.output, selectors.EVENT_READ, fresh)

    def end(held: Worker, why: str) -> None:
        selector.unregister(held.output)
        held.stop()
        if held.operator is not None:
            failed = {"dtype": "-", "passed": {}, "total": {"forward": 1}, "fallbacks": {}, "failures": [why]}
            done(held.operator, [*held.answers, failed])
        elif not held.ready:
            raise RuntimeError(f"a worker process did not start: {why}; try `python -m torch_tpu.conformance.worker "
                               "float32 1`")
        if queue:
            start()

    try:
        for _ in range(min(jobs, len(todo))):
            start()
        while selector.get_map():
            for key, _ in selector.select(timeout=1):
                held: Worker = key.data
                try:
                    lines = list(held.lines())
                except EOFError:
                    end(held, f"crashed with status {held.process.wait()}")
                    continue
                for line in lines:
                    if line == "ready":
                        held.ready = True
                    elif line:
                        held.answers.append(json.loads(line))
                        continue
                    elif held.operator is not None:
                        done(held.operator, held.answers)
                    held.operator = None
                    if queue:
                        held.give(queue.pop(), seconds)
                    else:
                        selector.unregister(held.output)
                        held.stop()
                        break
            for key in list(selector.get_map().values()):
                if time.monotonic() > key.data.deadline:
                    end(key.data, f"took longer than {seconds:g} s")
    finally:
        for key in list(selector.get_map().values()):
            key.data.stop()
