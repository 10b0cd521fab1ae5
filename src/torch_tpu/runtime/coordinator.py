"""Serves JAX's coordination service in a process of its own, which rank 0 starts with RANKS and HOST as arguments.

JAX aborts every rank when this service is gone. In a process of its own it outlives a rank 0 that dies or has finished,
so the other ranks can say what failed, or go on. Every rank holds a connection to it, on which it hears at once which
other rank left, and how. The process ends when no connection is left. Only jaxlib is imported: the file runs as a
script, outside the package.

A rank writes its number as four bytes, and before an orderly exit LEFT or FAILED. It reads lines "RANK HOW".
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from typing import Any

from jaxlib import _jax

# The process groups watch over the ranks: a rank that has finished, or is stopped in a debugger, ends nobody here.
HEARTBEAT_S = 1_000_000
LEFT, FAILED = b"l", b"f"
_HOW = {LEFT: "left", FAILED: "failed", b"": "died"}


def _listen(host: str, *, reuse: bool = False) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if reuse:
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_REUSEPORT", socket.SO_REUSEADDR), 1)
    made.bind((host, 0))
    return made


def serve(world: int, host: str) -> Any:
    """The service, and its port. The port stays bound (not listening) until gRPC, which sets SO_REUSEPORT too, has it:
    nobody can take it."""
    with _listen(host, reuse=True) as held:
        port = held.getsockname()[1]
        return _jax.get_distributed_runtime_service(f"{host}:{port}", world, heartbeat_timeout=HEARTBEAT_S), port


class Ranks:
    """The connections of the ranks."""

    def __init__(self, world: int, door: socket.socket) -> None:
        self.world, self.door = world, door
        self.came = 0
        self.here: dict[socket.socket, bytes] = {}  # what each has written: number, farewell

    def watch(self) -> None:
        """Returns when every rank came and went, or rank 0 (at this process's standard input) is gone and nobody is
        here."""
        parent = True
        with selectors.DefaultSelector() as selector:
            selector.register(self.door, selectors.EVENT_READ)
            selector.register(sys.stdin.buffer, selectors.EVENT_READ)
            while self.here or (parent and self.came < self.world):
                for key, _ in selector.select():
                    ready: Any = key.fileobj
                    if ready is self.door:
                        rank, _ = self.door.accept()
                        rank.setblocking(False)
                        selector.register(rank, selectors.EVENT_READ)
                        self.here[rank] = b""
                        self.came += 1
                    elif ready is sys.stdin.buffer:
                        parent = False
                        selector.unregister(ready)
                    elif not self.read(ready):
                        selector.unregister(ready)
                        self.tell(self.here.pop(ready))
                        ready.close()

    def read(self, rank: socket.socket) -> bool:
        """Whether it is still there."""
        try:
            got = rank.recv(16)
        except OSError:  # reset by a rank that was killed
            return False
        self.here[rank] += got
        return bool(got)

    def tell(self, written: bytes) -> None:
        line = f"{int.from_bytes(written[:4], 'big')} {_HOW.get(written[4:5], 'died')}\n".encode()
        for rank in self.here:
            try:
                rank.send(line)
            except OSError:  # it is going too
                continue


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # sent to the whole job; the ranks' connections say when to end
        signal.signal(each, signal.SIG_IGN)
    world, host = int(sys.argv[1]), sys.argv[2]
    _service, port = serve(world, host)
    with _listen(host) as door:
        door.listen(world)
        print(port, door.getsockname()[1], flush=True)
        Ranks(world, door).watch()
    os._exit(0)  # without the service's farewell, which would wait for ranks that left


if __name__ == "__main__":
    main()
