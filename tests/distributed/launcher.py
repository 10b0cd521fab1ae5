"""Runs a piece of code on several ranks under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PRELUDE = """
import os, sys, time, copy, warnings
import torch, torch.distributed as dist
from torch import nn
from datetime import timedelta
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
def close(a, b, what="", rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=rtol, atol=atol,
                               msg=lambda m: f"rank {rank} {what}: {m}")
def same(a, b, what=""):
    assert a == b, f"rank {rank} {what}: {a} != {b}"
def raises(kind, part, call):
    try:
        call()
    except kind as error:
        assert part in str(error), f"rank {rank}: {error}"
    else:
        raise AssertionError(f"rank {rank}: {kind.__name__} ({part}) was not raised")
"""


@dataclass
class Outcome:
    code: int
    output: str


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
OURS = ("-m", "torch_tpu.launch", "--standalone")


def _alive(token: str) -> list[str]:
    """Command lines of the processes that have the token in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and token.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # ended meanwhile, or another user's
            continue
    return [line for line in found if line]  # a zombie has none


def launch(folder: Path, body: str, ranks: int = 2, seconds: float = 150, init: bool = True,
           command: Sequence[str] = TORCHRUN, interrupt: int = 0, **environment: str) -> Outcome:
    """The outcome of torchrun on the body; every process must be gone when it has returned.

    Args:
        folder: the script is written there.
        init: whether the process group is made before the body.
        command: of the launcher.
        interrupt: a signal for the launcher, when all ranks have printed READY.
    """
    script = folder / "body.py"
    start = "dist.init_process_group()\n" if init else ""
    prelude = "" if "__main__" in body else PRELUDE + start
    # One write: the ranks share a pipe, and print makes several of what it prints.
    end = "\nimport os, sys; sys.stdout.flush(); os.write(1, f\"\\nFINISHED {os.environ['RANK']}\\n\".encode())\n"
    script.write_text(prelude + textwrap.dedent(body) + end)
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    token = f"TORCH_TPU_TEST_JOB={uuid.uuid4().hex}"
    env = {k: v for k, v in os.environ.items() if k not in dropped}
    env.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", **environment)
    env.update([token.split("=")])
    process = subprocess.Popen([sys.executable, *command, f"--nproc-per-node={ranks}", str(script)],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
                               start_new_session=True)
    before = ""
    try:
        if interrupt:
            assert process.stdout is not None
            while before.count("READY") < ranks and (line := process.stdout.readline()):
                before += line
            process.send_signal(interrupt)
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{ranks} ranks did not end within {seconds} s:\n{output[-4000:]}") from None
    until = time.monotonic() + 20
    while (left := _alive(token)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left, f"still running: {left}\n{output[-3000:]}"
    return Outcome(process.returncode, before + output)


def run(folder: Path, body: str, ranks: int = 2, seconds: float = 150, init: bool = True,
        command: Sequence[str] = TORCHRUN, **environment: str) -> str:
    """The output of a body that must finish on all ranks."""
    outcome = launch(folder, body, ranks, seconds, init, command, **environment)
    for rank in range(ranks):
        assert f"FINISHED {rank}" in outcome.output, outcome.output[-6000:]
    assert outcome.code == 0, outcome.output[-4000:]
    return outcome.output
