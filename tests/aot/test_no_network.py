"""Checks ask no network, and two at once do not collide on libtpu's lock."""

import json
import os
import platform
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                                reason="libtpu is for Linux on x86-64")
CHECK = [sys.executable, "-m", "torch_tpu", "check", "LlamaConfig", "--set", "num_hidden_layers=1", "--set",
         "hidden_size=64", "--set", "vocab_size=100", "--set", "num_attention_heads=2", "--set", "intermediate_size=64",
         "--topology", "v5e-1", "--program", "decode", "--prompt", "8", "--cache", "32", "--json"]
TIMEOUT_S = 120

# In every process that Python starts: connections and names are errors, and the process notes its settings as it ends.
GUARD = """
import atexit, json, os, socket, sys
def refused(*args, **kwargs):
    raise OSError(f"this test has no network: {args[1:] or args}")
socket.socket.connect = socket.socket.connect_ex = refused
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = refused
def note():
    with open(os.path.join(os.environ["GUARD"], str(os.getpid())), "w") as file:
        json.dump([sys.argv, dict(os.environ), "jax" in sys.modules], file)
atexit.register(note)
"""


def test_without_a_network():
    """In a network namespace of its own, which has not even a loopback device."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    prefix = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*prefix, "true"], capture_output=True, timeout=TIMEOUT_S).returncode:
        pytest.skip("unshare --map-root-user --net is not permitted here")
    done = subprocess.run([*prefix, *CHECK], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert json.loads(done.stdout)[0]["fits"]


def test_two_at_once_ask_nobody(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    (tmp_path / "notes").mkdir()
    settings = {**os.environ, "GUARD": str(tmp_path / "notes"), "PYTHONPATH": str(tmp_path)}
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_WORKER_HOSTNAMES"):
        settings.pop(name, None)
    running = [subprocess.Popen(CHECK, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)
               for _ in range(2)]
    reports = []
    for each in running:
        out, err = each.communicate(timeout=TIMEOUT_S)
        assert each.returncode == 0 and not err, err
        reports.append(json.loads(out)[0])
    assert reports[0]["fits"] and reports[0]["hbm_traffic"] == reports[1]["hbm_traffic"]
    notes = [json.loads(path.read_text()) for path in (tmp_path / "notes").iterdir()]
    compilers = [environment for argv, environment, jax in notes if argv[0].endswith("libtpu_door.py") and jax]
    assert len(notes) >= 4 and len(compilers) == 2
    for environment in compilers:  # what keeps libtpu itself, which is no Python, from asking and from locking
        assert environment["TPU_SKIP_MDS_QUERY"] == "1" and environment["TPU_WORKER_HOSTNAMES"] == "localhost"
        assert environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1" and environment["JAX_PLATFORMS"] == "cpu"
