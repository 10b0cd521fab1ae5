"""torch-tpu cache list | clear | path | stats."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_tpu
from torch_tpu import cli
from torch_tpu.runtime.cache import DiskCache

KEYS = [f"{i:02x}" * 32 for i in range(3)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_TPU_CACHE", raising=False)
    monkeypatch.delenv("TORCH_TPU_CACHE_SIZE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def filled(folder):
    disk = DiskCache(folder, 1 << 30)
    for key in KEYS:
        disk.put(key, b"x" * (1 << 20), {"jax": "0.10.2"}, f"aten.op{key[:2]}")
    for i, key in enumerate(KEYS):
        os.utime(folder / key[:2] / key[2:], (1e9 + i * 86400,) * 2)
    return folder


def said(capsys, *arguments):
    code = cli.main(["cache", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_path(folder, capsys):
    assert said(capsys, "path") == (0, f"{folder}\n", "")
    assert not folder.exists()


@pytest.mark.parametrize("action", ["list", "clear", "stats"])
def test_where_nothing_is(folder, capsys, action):
    assert said(capsys, action) == (0, f"{folder}: nothing there yet\n", "")
    assert not folder.exists()


def test_list(filled, capsys):
    damaged = filled / KEYS[2][:2] / KEYS[2][2:]
    damaged.write_bytes(b"")
    os.utime(damaged, (2e9, 2e9))
    code, out, err = said(capsys, "list")
    lines = out.splitlines()
    assert code == 0 and err == "" and lines[0].split() == ["last", "use", "age", "size", "jax", "key", "name"]
    assert [line.split()[-2] for line in lines[2:]] == [KEYS[1], KEYS[0]]  # the latest first
    assert KEYS[2] in lines[1] and lines[1].endswith("(is empty)")
    row = lines[3].split()
    assert row[0] == "2001-09-09" and row[3] == "s" and row[5:7] == ["KiB", "0.10.2"] and row[-1] == "aten.op00"
    assert float(row[4].replace(",", "")) == pytest.approx(1024, abs=1)


def test_stats(filled, capsys, monkeypatch):
    disk = DiskCache(filled, 1 << 30)
    for key in (KEYS[0], KEYS[0], KEYS[0], "ff" * 32):
        disk.get_or_make(key, "n", {"jax": "0.10.2"}, lambda p: p, lambda: b"m", lambda m: m)
    disk.flush()
    monkeypatch.setenv("TORCH_TPU_CACHE_SIZE", "512M")
    code, out, err = said(capsys)
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (code, err) == (0, "") and rows["executables"] == "4" and rows["bound"] == "512 MiB"
    assert rows["hits"] == "3 (75% of 4)" and rows["misses"] == "1" and rows["folder"] == str(filled)
    assert rows["size"] == "3.0 MiB" and "in use       yes" in out


def test_stats_say_why_it_is_not_used(filled, capsys, monkeypatch):
    filled.chmod(0o777)
    assert "in use       no: the folder may be written by other users (mode 0777)" in said(capsys, "stats")[1]
    monkeypatch.setenv("TORCH_TPU_CACHE", "off")
    filled.chmod(0o700)
    assert "in use       no (TORCH_TPU_CACHE=off)" in said(capsys, "stats")[1]


def test_clear(filled, capsys):
    (filled / "mine.txt").write_text("not the cache's")
    assert said(capsys, "clear") == (0, f"{filled}: removed 3 executables, 3.0 MiB freed\n", "")
    assert said(capsys, "list") == (0, f"{filled}: no executables\n", "")
    code, out, _ = said(capsys, "stats")
    assert code == 0 and "executables  0" in out and "hits         0\n" in out
    assert (filled / "mine.txt").exists()
    disk = DiskCache(filled, 1 << 30)
    disk.put(KEYS[0], b"x")
    assert disk.get(KEYS[0]) == b"x"


def test_what_is_wrong_is_said(folder, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_CACHE_SIZE", "big")
    code, out, err = said(capsys, "stats")
    assert (code, out) == (1, "") and "TORCH_TPU_CACHE_SIZE='big' is not a size" in err
    monkeypatch.delenv("TORCH_TPU_CACHE_SIZE")
    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nowhere/at/all")
    code, out, err = said(capsys, "path")
    assert (code, out, err) == (1, "", "torch-tpu: the home folder /nowhere/at/all does not exist\n")


@pytest.mark.parametrize("action", ["list", "clear", "path", "stats"])
def test_neither_torch_nor_jax_is_needed(filled, action):
    done = subprocess.run([sys.executable, "-c", f"""
import sys, types
package = types.ModuleType("torch_tpu")
package.__path__ = [{str(Path(torch_tpu.__file__).parent)!r}]
sys.modules["torch_tpu"] = package
from torch_tpu.cli import main
assert main(["cache", {action!r}]) == 0
assert not {{"torch", "jax", "jaxlib", "numpy"}} & set(sys.modules)
"""], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
