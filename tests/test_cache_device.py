"""The disk cache as a user meets it: programs on the device, in processes of their own, over a folder that is shared,
damaged, full or not to be trusted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from processes import python
from torch_tpu.runtime import cache_entry

# Seven programs, and what they give on the CPU. Prints one line of JSON.
WORK = """
    import json, torch
    torch.tpu.init()
    def work(device):
        a = torch.arange(12., device=device).reshape(3, 4)
        return (((a * 2 + 1).sin() @ a.T).sum() - a.mean()).item()
    got, want = work("tpu"), work("cpu")
    stats = torch.tpu.compiler.stats()
    print(json.dumps({"right": abs(got - want) < 1e-3, "compiled": stats.compiled, "loaded": stats.loaded}))
"""


@dataclass
class Ran:
    right: bool
    compiled: int
    loaded: int
    said: str


def finished(process: subprocess.CompletedProcess[str]) -> Ran:
    assert process.returncode == 0, process.stderr
    return Ran(**json.loads(process.stdout.splitlines()[-1]), said=process.stderr)


def run(folder: Path, before: str = "", **environment: str) -> Ran:
    return finished(python(textwrap.dedent(before) + textwrap.dedent(WORK),
                           **{"TORCH_TPU_CACHE_DIR": str(folder), **environment}))


def start(folder: Path, before: str = "", **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TPU_")}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(before) + textwrap.dedent(WORK)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**kept, "TORCH_TPU_CACHE_DIR": str(folder), **environment})


def end(process: subprocess.Popen[str], seconds: float = 120) -> Ran:
    out, err = process.communicate(timeout=seconds)
    return finished(subprocess.CompletedProcess([], process.returncode, out, err))


def until(condition, seconds=60.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with the programs of WORK, and how many they are."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    ran = run(folder)
    assert ran.right and ran.loaded == 0 and ran.said == "" and ran.compiled >= 6
    assert len(list(cache_entry.files(folder))) == ran.compiled
    return folder, ran.compiled


@pytest.fixture
def copy(filled, tmp_path):
    """The same, to be damaged."""
    subprocess.run(["cp", "-a", filled[0], tmp_path / "cache"], check=True)
    return tmp_path / "cache"


# Compilation that can be seen from outside and takes its time.
SLOW = """
    import os, time, torch
    from torch_tpu.runtime import jax_door
    original = jax_door.compile_module
    def slow(*arguments):
        with open(os.environ["COMPILED"], "a") as file:
            file.write("compiled\\n")
        time.sleep(float(os.environ["TAKES"]))
        return original(*arguments)
    jax_door.compile_module = slow
"""


def test_a_second_process_compiles_nothing(filled):
    folder, programs = filled
    assert run(folder) == Ran(True, 0, programs, "")


def test_nothing_is_unpickled(filled):
    folder, programs = filled
    ran = run(folder, """
        import pickle, torch
        torch.tpu.init()
        from torch_tpu.runtime import jax_door
        original = jax_door.load_executable
        def refuse(*_, **__):
            raise AssertionError("unpickled")
        def load(*arguments):
            kept = pickle.loads, pickle.load, pickle.Unpickler
            pickle.loads = pickle.load = pickle.Unpickler = refuse
            try:
                return original(*arguments)
            finally:
                pickle.loads, pickle.load, pickle.Unpickler = kept
        jax_door.load_executable = load
    """)
    assert ran == Ran(True, 0, programs, "")


@pytest.mark.parametrize("number", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_race_on_an_empty_folder(filled, tmp_path, number):
    _, programs = filled
    log = tmp_path / "log"
    waiting = """
        import os, time, torch
        torch.tpu.init()
        open(f"{os.environ['COMPILED']}.{os.getpid()}", "w").close()
        while not os.path.exists(os.environ["COMPILED"] + ".go"):
            time.sleep(0.002)
    """
    processes = [start(tmp_path / "cache", textwrap.dedent(SLOW) + textwrap.dedent(waiting), COMPILED=str(log),
                       TAKES="0.1") for _ in range(number)]
    until(lambda: len(list(tmp_path.glob("log.*"))) == number, 120)
    (tmp_path / "log.go").touch()
    ran = [end(process) for process in processes]
    assert all(each.right and each.compiled + each.loaded == programs and each.said == "" for each in ran)
    assert sum(each.compiled for each in ran) == programs == len(log.read_text().split())
    assert len(list(cache_entry.files(tmp_path / "cache"))) == programs
    assert not list(cache_entry.leftovers(tmp_path / "cache"))


def test_killed_while_compiling(filled, tmp_path):
    _, programs = filled
    log = tmp_path / "log"
    first = start(tmp_path / "cache", SLOW, COMPILED=str(log), TAKES="600")
    until(log.exists)
    second = start(tmp_path / "cache", TORCH_TPU_LOGS="compile")
    said = []
    for line in second.stderr:
        said.append(line)
        if "waiting" in line:
            break
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    ran = end(second)
    assert ran.right and ran.compiled == programs
    assert any(f"torch_tpu: waiting for process {first.pid}, which compiles " in line for line in said), said
    assert not list(cache_entry.leftovers(tmp_path / "cache"))


@pytest.mark.slow
def test_killed_while_writing(filled, tmp_path):
    _, programs = filled
    ran = python(textwrap.dedent("""
        import os, signal, torch
        from torch_tpu.runtime import cache
        torch.tpu.init()
        replace = cache.os.replace
        count = 0
        def kill(*paths):
            global count
            count += 1
            if count == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*paths)
        cache.os.replace = kill
    """) + textwrap.dedent(WORK), TORCH_TPU_CACHE_DIR=str(tmp_path / "cache"))
    assert ran.returncode == -signal.SIGKILL
    left = [path for path, _ in cache_entry.leftovers(tmp_path / "cache")]
    assert [path.suffix for path in left if path.suffix == ".new"] == [".new"]
    for path in left:
        os.utime(path, (time.time() - 7200,) * 2)
    totals = tmp_path / "cache" / ".totals"
    kept = json.loads(totals.read_text())
    totals.write_text(json.dumps({**kept, "scanned": kept["scanned"] - 90_000}))  # a day later
    assert run(tmp_path / "cache") == Ran(True, programs - 2, 2, "")
    assert not list(cache_entry.leftovers(tmp_path / "cache"))
    assert run(tmp_path / "cache") == Ran(True, 0, programs, "")


def rewritten(path: Path, payload: bytes | None = None, **environment: str) -> None:
    """An entry with right checksums that was made elsewhere, or holds something else."""
    header, begin = cache_entry.unpack(path.read_bytes())
    payload = path.read_bytes()[begin:] if payload is None else payload
    made = cache_entry.header_for(header.key, header.name, {**header.environment, **environment}, header.created,
                                  payload)
    path.write_bytes(cache_entry.pack(made) + payload)


def test_damaged_entries(copy, filled):
    _, programs = filled
    paths = sorted(path for path, _ in cache_entry.files(copy))
    content = paths[1].read_bytes()
    paths[0].write_bytes(b"")
    paths[1].write_bytes(content[:-200])
    flipped = bytearray(paths[2].read_bytes())
    flipped[-300] ^= 1
    paths[2].write_bytes(flipped)
    rewritten(paths[3], jaxlib="0.9.9")
    rewritten(paths[4], cpu="another CPU")
    rewritten(paths[5], b"right checksum, no executable")
    ran = run(copy)
    lines = ran.said.splitlines()
    assert ran.right and (ran.compiled, ran.loaded) == (6, programs - 6)
    assert len(lines) == 6 and all(line.startswith("torch_tpu: discarded the cache entry ") for line in lines)
    for part in ("is empty", "is cut off or too long", "its content does not match its checksum",
                 "was made elsewhere (jaxlib 0.9.9, here ", "was made elsewhere (cpu another CPU, here ",
                 "which XLA does not load (INVALID_ARGUMENT: "):
        assert sum(part in line for line in lines) == 1, (part, ran.said)
    assert run(copy) == Ran(True, 0, programs, "")


@pytest.mark.slow
def test_a_folder_that_others_may_write(copy, filled):
    copy.chmod(0o777)
    ran = run(copy)
    assert ran.right and (ran.compiled, ran.loaded) == (filled[1], 0)
    assert ran.said.count("\n") == 1 and "is not used: it may be written by other users (mode 0777)" in ran.said


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "mounted"
    place.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k,mode=0700", "none", place],
                      capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.slow
def test_a_full_disk_and_then_a_read_only_one(small_disk, filled):
    _, programs = filled
    ran = run(small_disk)
    assert ran.right and ran.compiled == programs
    assert ran.said.count("\n") == 1 and "(No space left on device)" in ran.said
    kept = len(list(cache_entry.files(small_disk)))
    assert 1 <= kept < programs
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    ran = run(small_disk)
    assert ran.right and (ran.compiled, ran.loaded) == (programs - kept, kept)
    assert ran.said.count("\n") == 1 and "(Read-only file system)" in ran.said


@pytest.mark.slow
@pytest.mark.parametrize("home, part", [("/nowhere/at/all", "the home folder /nowhere/at/all does not exist"),
                                        ("/proc", "cannot be kept in /proc/.cache/torch_tpu/executables")])
def test_no_home_to_write_to(home, part, filled):
    process = python(WORK, HOME=home, TORCH_TPU_CACHE_DIR="", XDG_CACHE_HOME="")
    ran = finished(process)
    assert ran.right and ran.compiled == filled[1] and ran.said.count("\n") == 1 and part in ran.said


def test_ranks_of_a_job_compile_once(filled, tmp_path):
    """What every rank computes for itself is one program, whichever chip it runs on."""
    _, programs = filled
    script = tmp_path / "body.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group()\n" + textwrap.dedent(WORK) +
                      "dist.destroy_process_group()\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_TPU_")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True, text=True, timeout=150, check=False,
        env={**kept, "TORCH_TPU_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    ran = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(ran) == 2 and all(each["right"] for each in ran)
    assert sum(each["compiled"] for each in ran) == programs
    assert sum(each["loaded"] for each in ran) == programs
