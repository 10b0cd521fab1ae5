"""The folder of compiled executables, without a device: entries, trust, bound, locks, what kills leave behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

import torch_tpu
from torch_tpu.runtime import cache, cache_entry, cache_lock
from torch_tpu.runtime.cache import DiskCache

KEY, OTHER = "ab" * 32, "cd" * 32
HERE = {"jax": "0.10.2", "cpu": "this one"}
ROOT = os.geteuid() == 0


def light(code: str, *arguments: object) -> list[str]:
    """A command that runs code in a process with torch_tpu.runtime and neither torch nor JAX, so that it is quick."""
    start = f"""
        import os, sys, time, types
        package = types.ModuleType("torch_tpu")
        package.__path__ = [{str(Path(torch_tpu.__file__).parent)!r}]
        sys.modules["torch_tpu"] = package
        from pathlib import Path
        from torch_tpu.runtime import cache, cache_entry, cache_lock
        from torch_tpu.runtime.cache import DiskCache
    """
    return [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code), *map(str, arguments)]


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def disk(tmp_path):
    return DiskCache(tmp_path / "cache", 1 << 30)


def entry(disk, key=KEY):
    return disk.folder / key[:2] / key[2:]


def names(disk):
    return sorted(path.name for path in disk.folder.rglob("*") if path.is_file())


def test_what_is_put_is_gotten(disk, capsys):
    assert disk.get(KEY, HERE) is None
    disk.put(KEY, b"payload" * 100, HERE, "aten.add")
    assert disk.get(KEY, HERE) == b"payload" * 100 and disk.get(OTHER, HERE) is None
    assert DiskCache(disk.folder, 1 << 30).get(KEY, HERE) == b"payload" * 100
    assert stat.S_IMODE(disk.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(disk).parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(disk).stat().st_mode) == 0o600
    header = cache_entry.read_header(entry(disk))
    assert header.name == "aten.add" and header.environment == HERE and abs(header.created - time.time()) < 60
    assert capsys.readouterr().err == ""


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def replace(path, made):
    path.unlink()
    made(path)


def linked(path):
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def folder_with_a_file(path):
    replace(path, Path.mkdir)
    (path / "something").write_text("x")


def under_another_name(path):
    disk = DiskCache(path.parent.parent, 1 << 30)
    disk.put(OTHER, b"another program", HERE)
    os.replace(entry(disk, OTHER), path)


def made_elsewhere(**difference):
    def change(path):
        DiskCache(path.parent.parent, 1 << 30).put(KEY, b"of another machine", {**HERE, **difference})
    return change


DAMAGE = {
    "zero-length": (lambda p: p.write_bytes(b""), "is empty"),
    "garbage": (lambda p: p.write_bytes(os.urandom(5000)), "is no executable that this version"),
    "pickle": (lambda p: p.write_bytes(b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR."), "is no executable that this"),
    "magic only": (lambda p: p.write_bytes(p.read_bytes()[:23]), "is damaged (its first lines)"),
    "header cut": (lambda p: p.write_bytes(p.read_bytes()[:150]), "is cut off in its header"),
    "payload cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is cut off or too long (4,999 bytes of 5,000)"),
    "too long": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "is cut off or too long (5,001 bytes of 5,000)"),
    "bit in the payload": (lambda p: flip(p, -100), "its content does not match its checksum"),
    "bit in the header": (lambda p: flip(p, 140), "its header does not match its checksum"),
    "bit in the length": (lambda p: flip(p, 24), "is "),
    "other jax": (made_elsewhere(jax="0.9.0"), "was made elsewhere (jax 0.9.0, here 0.10.2)"),
    "other CPU": (made_elsewhere(cpu="that one"), "was made elsewhere (cpu that one, here this one)"),
    "another program": (under_another_name, "is another program's"),
    "folder": (folder_with_a_file, "is a folder"),
    "symbolic link": (linked, "is a symbolic link"),
    "broken link": (lambda p: replace(p, lambda p: p.symlink_to("nowhere")), "is a symbolic link"),
    "named pipe": (lambda p: replace(p, os.mkfifo), "is no file"),
    "writable by all": (lambda p: p.chmod(0o666), "may be written by other users (mode 0666)"),
    "another user's": (lambda p: os.chown(p, 65534, -1), "belongs to "),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_cannot_be_trusted_is_discarded_with_a_line(disk, kind, capsys):
    if kind == "another user's" and not ROOT:
        pytest.skip("only root gives files away")
    damage, why = DAMAGE[kind]
    disk.put(KEY, b"p" * 5000, HERE)
    damage(entry(disk))
    assert disk.get(KEY, HERE) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"torch_tpu: discarded the cache entry {KEY}, which "), said
    assert why in said
    assert said.endswith("; the program is compiled again\n")
    assert not entry(disk).exists() and not entry(disk).is_symlink()
    assert disk.get(KEY, HERE) is None and capsys.readouterr().err == ""  # now it is an ordinary miss
    disk.put(KEY, b"again", HERE)
    assert disk.get(KEY, HERE) == b"again"


def test_nothing_of_a_payload_is_seen_before_the_header_is_right(disk):
    disk.put(KEY, b"p" * 50, HERE)
    for damage, _ in (DAMAGE["other jax"], DAMAGE["another program"], DAMAGE["bit in the payload"]):
        damage(entry(disk))

        def load(payload):
            raise AssertionError("reached")

        assert disk.get_or_make(KEY, "n", HERE, load, lambda: b"made", lambda made: made) == (b"made", False)


def test_what_xla_does_not_load_is_discarded(disk, capsys):
    disk.put(KEY, b"nonsense with a right checksum", HERE)

    def load(payload):
        raise cache.Unusable("XLA does not load (bad proto)")

    assert disk.get_or_make(KEY, "n", HERE, load, lambda: b"made", lambda made: made) == (b"made", False)
    assert "which XLA does not load (bad proto); the" in capsys.readouterr().err and disk.get(KEY, HERE) == b"made"


def test_an_entry_that_replaced_a_damaged_one_is_not_removed(disk):
    disk.put(KEY, b"old", HERE)
    _, inode = cache_entry.read(entry(disk))
    disk.put(KEY, b"new", HERE)
    disk._discard(KEY, "was damaged", inode)
    assert disk.get(KEY, HERE) == b"new"


# Trust in the folder


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_not_used(tmp_path, mode, capsys):
    folder = tmp_path / "cache"
    DiskCache(folder, 1 << 30).put(KEY, b"x", HERE)
    folder.chmod(mode)
    disk = DiskCache(folder, 1 << 30)
    assert disk.get(KEY, HERE) is None
    disk.put(OTHER, b"y", HERE)
    assert disk.get_or_make(OTHER, "n", HERE, lambda p: p, lambda: b"made", lambda m: m) == (b"made", False)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"is not used: it may be written by other users (mode {mode:04o})" in said
    assert not entry(disk, OTHER).exists()


@pytest.mark.skipif(not ROOT, reason="only root gives folders away")
def test_a_folder_of_another_user_is_not_used(tmp_path, capsys):
    folder = tmp_path / "cache"
    DiskCache(folder, 1 << 30).put(KEY, b"x", HERE)
    os.chown(folder, 65534, 65534)
    assert DiskCache(folder, 1 << 30).get(KEY, HERE) is None  # also root does not use it
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is not used: it belongs to" in said and "runs as root" in said


def test_a_place_that_cannot_be_a_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "cache"):
        disk = DiskCache(place, 1 << 30)
        disk.put(KEY, b"x", HERE)
        assert disk.get(KEY, HERE) is None
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "cannot be kept" in said and str(place) in said


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 128 KiB, and a function that mounts it read-only."""
    place = tmp_path / "mounted"
    place.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k,mode=0700", "none", place],
                      capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield place, lambda: subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(small_disk, capsys):
    place, _ = small_disk
    disk = DiskCache(place / "cache", 1 << 30)
    kept = [f"{i:064x}" for i in range(256, 276)]
    for key in kept:
        disk.put(key, os.urandom(20000), HERE)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "(No space left on device); those that are there are used" in said
    there = [key for key in kept if disk.get(key, HERE) is not None]
    assert 3 <= len(there) < 20 and capsys.readouterr().err == ""
    assert not list(place.rglob("*.new"))
    again = DiskCache(place / "cache", 1 << 30)  # the next process
    assert again.get_or_make(KEY, "n", HERE, lambda p: p, lambda: b"m" * 20000, lambda m: m) == (b"m" * 20000, False)
    assert again.get(there[0], HERE) is not None
    assert capsys.readouterr().err.count("\n") == 1


def test_a_read_only_disk(small_disk, capsys):
    place, lock_down = small_disk
    DiskCache(place / "cache", 1 << 30).put(KEY, b"x", HERE)
    DiskCache(place / "cache", 1 << 30).put(OTHER, b"y", HERE)
    flip(place / "cache" / OTHER[:2] / OTHER[2:], -1)
    lock_down()
    disk = DiskCache(place / "cache", 1 << 30)
    assert disk.get(KEY, HERE) == b"x" and capsys.readouterr().err == ""  # reading needs no more
    assert disk.get(OTHER, HERE) is None
    assert "ignored the cache entry" in capsys.readouterr().err
    for key in ("ab" + "1" * 62, "ef" * 32):  # beside an entry, and in a folder that is not there
        assert disk.get_or_make(key, "n", HERE, lambda p: p, lambda: b"m", lambda m: m) == (b"m", False)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "(Read-only file system); those that are there are used" in said


@pytest.mark.skipif(not ROOT, reason="only root becomes another user")
def test_permissions():
    """What a user meets who is not root: a home that cannot be written, a folder and an entry that may only be read."""
    with tempfile.TemporaryDirectory() as place:  # tmp_path is root's
        os.chmod(place, 0o755)
        folder = Path(place) / "cache"
        disk = DiskCache(folder, 1 << 30)
        disk.put(KEY, b"x", HERE)
        disk.put(OTHER, b"y", HERE)
        entry(disk, OTHER).chmod(0)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534)
            if path.is_dir():
                path.chmod(0o500)
        done = subprocess.run(light("""
            os.setegid(65534)
            os.seteuid(65534)
            here = {"jax": "0.10.2", "cpu": "this one"}
            disk = DiskCache(Path(sys.argv[1]), 1 << 30)
            print(disk.get("ab" * 32, here), disk.get("cd" * 32, here))
            for key in ("ab" + "1" * 62, "ef" * 32):
                print(disk.get_or_make(key, "n", here, lambda p: p, lambda: b"m", lambda m: m))
            os.environ.update(HOME=sys.argv[2], TORCH_TPU_CACHE_DIR="", XDG_CACHE_HOME="")
            home = cache.disk()
            print(home.usable, home.get("ab" * 32))
            os.environ.update(HOME="/root/hidden")
            cache._cache = None
            print(cache.disk())
        """, folder, place), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["b'x' None", "(b'm', False)", "(b'm', False)", "False None", "None"]
        said = done.stderr.splitlines()
        assert len(said) == 4, said
        assert f"ignored the cache entry {OTHER}, which cannot be read (permission denied)" in said[0]
        assert "(Permission denied); those that are there are used" in said[1]
        assert f"cannot be kept in {place}/.cache/torch_tpu/executables (Permission denied)" in said[2]
        assert "cannot be kept (the home folder /root/hidden does not exist)" in said[3]


def test_the_folder_may_vanish(disk):
    import shutil

    disk.put(KEY, b"x", HERE)
    shutil.rmtree(disk.folder)
    assert disk.get(KEY, HERE) is None
    disk.put(KEY, b"y", HERE)
    assert disk.get(KEY, HERE) == b"y"


def test_a_file_in_place_of_a_subfolder(disk, capsys):
    (disk.folder / KEY[:2]).write_text("x")
    assert disk.get(KEY, HERE) is None
    disk.put(KEY, b"x", HERE)
    assert disk.get(KEY, HERE) == b"x"
    assert capsys.readouterr().err == f"torch_tpu: discarded {disk.folder / KEY[:2]}, which is no folder\n"


def test_no_home(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TORCH_TPU_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache, "_cache", None)
    monkeypatch.setattr(cache, "_homeless", False)
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    assert cache.disk() is None and cache.disk() is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "gone does not exist" in said and not (tmp_path / "gone").exists()
    monkeypatch.setattr(cache, "_homeless", False)

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert cache.disk() is None
    assert "this user has no home folder" in capsys.readouterr().err


def test_off(monkeypatch):
    monkeypatch.setenv("TORCH_TPU_CACHE", "off")
    assert cache.disk() is None


# The bound


def fill(folder, count, size=1000):
    """Entries that were used one after the other, oldest first."""
    disk = DiskCache(folder, 1 << 40)
    keys = [f"{i % 256:02x}{i:062x}" for i in range(count)]
    for i, key in enumerate(keys):
        disk.put(key, b"x" * size, HERE)
        os.utime(entry(disk, key), (i, i))
    return keys


def test_the_least_recently_used_go(tmp_path):
    folder = tmp_path / "cache"
    keys = fill(folder, 20)
    assert DiskCache(folder, 1 << 40).get(keys[0], HERE) is not None  # now the latest
    size = sum(info.st_size for _, info in cache_entry.files(folder))
    disk = DiskCache(folder, size)
    disk.put(KEY, b"x" * 1000, HERE)
    left = [key for key in keys if entry(disk, key).exists()]
    assert left == [keys[0], *keys[-(len(left) - 1):]] and 15 <= len(left) <= 17
    assert sum(info.st_size for _, info in cache_entry.files(folder)) <= size * 0.9
    assert disk.get(KEY, HERE) is not None


def test_one_larger_than_the_bound(tmp_path, capsys):
    disk = DiskCache(tmp_path / "cache", 1000)
    disk.put(KEY, b"x" * 2000, HERE, "graph")
    assert disk.get(KEY, HERE) is None and "graph (0.0 MiB) is larger than the bound" in capsys.readouterr().err


def test_only_files_named_like_entries_are_removed(tmp_path):
    """TORCH_TPU_CACHE_DIR may name a folder that holds other things."""
    (tmp_path / "go").mkdir()
    mine = [tmp_path / "go" / "main.go", tmp_path / "notes.txt"]
    for path in mine:
        path.write_text("x" * 5000)
    disk = DiskCache(tmp_path, 3000)
    for key in (KEY, OTHER, "ef" * 32):
        disk.put(key, b"x" * 1000, HERE)
    assert all(path.exists() for path in mine) and entry(disk, "ef" * 32).exists() and not entry(disk).exists()


def test_an_entry_that_is_evicted_while_it_is_looked_for_is_a_miss(disk, monkeypatch, capsys):
    disk.put(KEY, b"x", HERE)
    original = os.open

    def evicted_first(path, *rest, **options):
        Path(path).unlink(missing_ok=True)
        return original(path, *rest, **options)

    monkeypatch.setattr(os, "open", evicted_first)
    assert disk.get(KEY, HERE) is None
    monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_damaged_totals_are_counted_anew(disk):
    for text in (b"", b"{", b"[]", b'{"bytes": "many"}', os.urandom(50)):
        (disk.folder / ".totals").write_bytes(text)
        disk.put(KEY, b"x" * 100, HERE)
        assert disk._totals.read()["bytes"] == entry(disk).stat().st_size


def test_ten_thousand_entries_cost_little(tmp_path):
    folder = tmp_path / "cache"
    disk = DiskCache(folder, 1 << 40)
    content = cache_entry.pack(cache_entry.header_for(KEY, "n", HERE, 0.0, b"x" * 2000)) + b"x" * 2000
    for i in range(256):
        (folder / f"{i:02x}").mkdir(mode=0o700)
    for i in range(10_000):
        (folder / f"{i % 256:02x}" / f"{i:062x}").write_bytes(content)
    disk.put(KEY, b"x" * 20_000, HERE)  # looks through the folder, once
    assert disk._totals.read()["bytes"] >= 10_000 * len(content)

    def cost(action):
        begin = time.perf_counter()
        for i in range(100):
            action(i)
        return (time.perf_counter() - begin) / 100

    assert cost(lambda i: disk.get(KEY, HERE)) < 0.002
    assert cost(lambda i: disk.put(f"{i:064x}", b"x" * 20_000, HERE)) < 0.005  # a look each time would take longer


# Several processes


def test_threads_and_processes_make_one_thing_once(tmp_path):
    def work(code):
        return subprocess.Popen(light("""
            disk = DiskCache(Path(sys.argv[1]), 1 << 30)
            while not os.path.exists(sys.argv[2]): time.sleep(0.001)
            for i in range(5):
                def make():
                    time.sleep(0.05)
                    with open(sys.argv[3], "a") as file: file.write(f"{i}\\n")
                    return b"made %d" % i
                made, _ = disk.get_or_make(f"{i:064x}", f"program {i}", {}, lambda p: p, make, lambda m: m)
                assert made == b"made %d" % i
        """, tmp_path / "cache", tmp_path / "go", tmp_path / "log"), stderr=subprocess.PIPE, text=True)
    processes = [work(i) for i in range(8)]
    time.sleep(0.3)
    (tmp_path / "go").touch()
    for process in processes:
        assert process.communicate(timeout=60) == (None, "") and process.returncode == 0
    assert sorted((tmp_path / "log").read_text().split()) == list("01234")

    disk, made = DiskCache(tmp_path / "cache", 1 << 30), []

    def make():
        time.sleep(0.05)
        made.append(1)
        return b"m"

    threads = [threading.Thread(target=lambda: disk.get_or_make(KEY, "n", {}, lambda p: p, make, lambda m: m))
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1] and not list(disk.folder.rglob("*.lock"))


def test_threads_note_once_and_count_all(small_disk, capsys):
    place, lock_down = small_disk
    disk = DiskCache(place / "cache", 1 << 30)
    disk.put(KEY, b"x")
    lock_down()

    def work(number):
        for i in range(50):
            disk.get_or_make(f"{number:02x}{i:062x}", "n", {}, lambda p: p, lambda: b"m", lambda m: m)
            disk.get_or_make(KEY, "n", {}, lambda p: p, lambda: b"m", lambda m: m)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (disk.hits, disk.misses) == (400, 400)
    assert capsys.readouterr().err.count("\n") == 1


HOLD = """
    disk = DiskCache(Path(sys.argv[1]), 1 << 30)
    def make():
        Path(sys.argv[2]).touch()
        time.sleep(600)
    disk.get_or_make(sys.argv[3], "graph", {}, lambda p: p, make, lambda m: m)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that compiles KEY and does not come to an end."""
    process = subprocess.Popen(light(HOLD, tmp_path / "cache", tmp_path / "compiling", KEY))
    until((tmp_path / "compiling").exists)
    yield process
    process.kill()
    process.wait()


def test_a_killed_holder_lets_go(tmp_path, holder, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_TPU_LOGS", "compile")
    disk = DiskCache(tmp_path / "cache", 1 << 30)
    killer = threading.Timer(0.5, lambda: os.kill(holder.pid, signal.SIGKILL))
    killer.start()
    begin = time.monotonic()
    assert disk.get_or_make(KEY, "graph", {}, lambda p: p, lambda: b"mine", lambda m: m) == (b"mine", False)
    assert 0.4 < time.monotonic() - begin < 20
    assert capsys.readouterr().err == f"torch_tpu: waiting for process {holder.pid}, which compiles graph ...\n"
    assert disk.get(KEY) == b"mine" and not list(disk.folder.rglob("*.lock"))


def test_waiting_ends(tmp_path, holder, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_TPU_CACHE_WAIT", "1")
    disk = DiskCache(tmp_path / "cache", 1 << 30)
    assert disk.get_or_make(KEY, "graph", {}, lambda p: p, lambda: b"mine", lambda m: m) == (b"mine", False)
    assert capsys.readouterr().err == (
        f"torch_tpu: waited 1 s for process {holder.pid}, which compiles graph; this process now compiles it too "
        "(TORCH_TPU_CACHE_WAIT is the time to wait)\n")
    assert disk.get_or_make(OTHER, "other", {}, lambda p: p, lambda: b"o", lambda m: m) == (b"o", False)
    assert capsys.readouterr().err == ""  # other programs do not wait


def test_a_terminal_shows_who_is_waited_for(tmp_path, holder, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_TPU_CACHE_WAIT", "2")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    disk = DiskCache(tmp_path / "cache", 1 << 30)
    disk.get_or_make(KEY, "graph", {}, lambda p: p, lambda: b"mine", lambda m: m)
    said = capsys.readouterr().err
    assert said.startswith(f"torch_tpu: waiting for process {holder.pid}, which compiles graph ...\r\033[K")
    assert said.count("waiting") == 1 and said.count("waited 2 s") == 1


def test_a_wrong_time_to_wait(disk, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_CACHE_WAIT", "long")
    with pytest.raises(ValueError, match="TORCH_TPU_CACHE_WAIT='long' must be a whole number"):
        disk.get_or_make(KEY, "graph", {}, lambda p: p, lambda: b"mine", lambda m: m)


def test_a_failed_compilation_lets_go(disk):
    def make():
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        disk.get_or_make(KEY, "graph", {}, lambda p: p, make, lambda m: m)
    assert not list(disk.folder.rglob("*.lock"))
    assert disk.get_or_make(KEY, "graph", {}, lambda p: p, lambda: b"m", lambda m: m) == (b"m", False)


def test_without_locks_each_compiles(disk, monkeypatch, capsys):
    import fcntl

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("TORCH_TPU_LOGS", "compile")
    for key in (KEY, OTHER):
        assert disk.get_or_make(key, "graph", {}, lambda p: p, lambda: b"m", lambda m: m) == (b"m", False)
    assert capsys.readouterr().err == (
        f"torch_tpu: {disk.folder} takes no lock files: each process compiles what it needs\n")
    assert disk.get(KEY) == b"m"


def test_a_forked_child_does_not_keep_a_lock(tmp_path):
    (tmp_path / "c").mkdir()
    lock = cache_lock.Lock(tmp_path / "c" / "lock", "n")
    assert lock.wait(lambda: False) is cache_lock.Turn.MINE
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    try:
        # As if this process were killed: its descriptor ends, without unlocking.
        os.close(lock._descriptor)
        cache_lock._held.discard(lock._descriptor)
        other = cache_lock.Lock(tmp_path / "c" / "lock", "n")
        assert other.wait(lambda: False) is cache_lock.Turn.MINE
        other.release()
    finally:
        child.kill()
        child.join()


def test_killed_while_writing(tmp_path):
    """Whatever moment the kill hits, what is there is whole, and what was begun is removed later."""
    for i in range(8):
        process = subprocess.Popen(light("""
            disk = DiskCache(Path(sys.argv[1]), 1 << 30)
            Path(sys.argv[2]).touch()
            for i in range(100000): disk.put(f"{i % 50:064x}", b"%d" % (i % 50) * 300_000, {})
        """, tmp_path / "cache", tmp_path / f"began{i}"))
        until((tmp_path / f"began{i}").exists)
        time.sleep(0.02 + 0.011 * i)
        process.kill()
        process.wait()
    disk = DiskCache(tmp_path / "cache", 1 << 30)
    read = [disk.get(f"{i:064x}") for i in range(50)]
    assert any(read) and all(found in (None, b"%d" % i * 300_000) for i, found in enumerate(read))
    left = disk.folder / "00" / f".{62 * '0'}.123.abcdef01.new"  # that of a kill in mid-write
    left.write_bytes(b"half")
    fresh = left.with_name(f".{62 * '0'}.124.abcdef01.new")
    fresh.write_bytes(b"being written")
    lock = left.with_name(f".{62 * '0'}.lock")
    lock.write_text("1 host")
    for path in (left, lock):
        os.utime(path, (time.time() - 7200,) * 2)
    disk.evict()
    assert not left.exists() and not lock.exists() and fresh.exists()


def test_many_processes_keep_the_bound(tmp_path):
    limit = 300_000
    processes = [subprocess.Popen(light("""
        disk = DiskCache(Path(sys.argv[1]), int(sys.argv[2]))
        for i in range(60):
            key = f"{i % 16:02x}{int(sys.argv[3]):02x}{i:060x}"
            disk.put(key, b"x" * 10_000, {})
            for other in range(6):
                got = disk.get(f"{i % 16:02x}{other:02x}{i:060x}")
                assert got in (None, b"x" * 10_000)
    """, tmp_path / "cache", limit, i), stderr=subprocess.PIPE, text=True) for i in range(6)]
    for process in processes:
        assert process.communicate(timeout=60) == (None, "") and process.returncode == 0
    size = sum(info.st_size for _, info in cache_entry.files(tmp_path / "cache"))
    assert limit * 0.5 < size <= limit * 1.1
    assert DiskCache(tmp_path / "cache", limit)._totals.read()["bytes"] == pytest.approx(size, rel=0.15)
