"""torch-tpu doctor and torch-tpu cache."""

from __future__ import annotations

import subprocess
import sys

import pytest

from processes import python
from torch_tpu import cli, doctor
from torch_tpu.runtime import config


def test_a_healthy_machine(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("Versions", "torch ", "jaxlib", "virtual chips", "no TPU chip", "Self test", "second op", "autoload",
                 *(setting.name for setting in config.SETTINGS)):
        assert part in text, part
    assert "error:" not in text


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "torch_tpu", "doctor", "--no-test"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0 and "Findings" in done.stdout, done.stderr


def test_a_wrong_setting():
    done = python("import sys; from torch_tpu.cli import main; sys.exit(main(['doctor']))", TORCH_TPU_PLATFORM="nope")
    assert done.returncode == 1
    assert done.stdout.count("error: ") == 1 and "TORCH_TPU_PLATFORM='nope' is not known" in done.stdout
    done = python("import sys; from torch_tpu.cli import main; sys.exit(main(['doctor']))", TORCH_TPU_DEBUG="perhaps",
                  TORCH_TPU_CACHE_SIZE="big", TORCH_TPU_PLATFROM="cpu")
    assert done.returncode == 1 and done.stdout.count("error: ") == 2
    for part in ("TORCH_TPU_DEBUG='perhaps'", "TORCH_TPU_CACHE_SIZE='big'", "note:  TORCH_TPU_PLATFROM is set"):
        assert part in done.stdout


def test_what_is_missing_comes_with_its_command(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name.startswith("jax") else "1")
    report = doctor.examine(test=False)
    assert report.errors == ["jax is not installed: pip install 'jax>=0.10,<0.12'"]
    assert doctor.run(test=False) == 1


def test_chips_without_libtpu(monkeypatch):
    from torch_tpu.runtime import platform

    monkeypatch.setattr(platform, "scan_chips", lambda: ("v5e", 4))
    monkeypatch.setattr(platform, "has_libtpu", lambda: False)
    platform.choose.cache_clear()
    try:
        report = doctor.examine(test=False)
    finally:
        platform.choose.cache_clear()
    assert "4 x v5e" in report.text() and any("pip install 'torch_tpu[tpu]'" in line for line in report.errors)


def test_the_cache(tmp_path, monkeypatch, capsys):
    from torch_tpu.runtime.cache import DiskCache

    monkeypatch.setenv("TORCH_TPU_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["cache"]) == 0 and "nothing there yet" in capsys.readouterr().out
    DiskCache(tmp_path / "cache", 1 << 20).put("ab" * 32, b"x" * 3000)
    assert cli.main(["cache", "path"]) == 0 and str(tmp_path) in capsys.readouterr().out
    assert cli.main(["cache", "list"]) == 0 and "ab" * 32 in capsys.readouterr().out
    assert cli.main(["cache", "stats"]) == 0 and "executables  1" in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0 and "removed 1" in capsys.readouterr().out
    assert cli.main(["cache", "stats"]) == 0 and "executables  0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["cache", "burn"])
