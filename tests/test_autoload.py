"""How the device appears, in every order of imports, and how it stays away when something is broken."""

from __future__ import annotations

import pytest

from processes import python

USE = "assert torch.ones(2, device='tpu').add(1).tolist() == [2, 2]; print('fine')"


def test_import_torch_alone_quiet_and_without_jax():
    done = python(f"""
        import sys, threading
        import torch
        assert "jax" not in sys.modules and threading.active_count() == 1
        assert "torch._dynamo" not in sys.modules and "transformers" not in sys.modules
        {USE}
    """, "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", ""), done.stderr


def test_switched_off_and_then_by_hand():
    done = python(f"""
        import torch
        try:
            torch.ones(1, device="tpu")
        except RuntimeError as error:
            print(str(error)[:20])
        assert not hasattr(torch, "tpu")
        import torch_tpu
        {USE}
    """, "-W", "error", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines()[1:] == ["fine"], done.stderr


def test_torch_tpu_first():
    done = python(f"import torch_tpu, torch\n{USE}", "-W", "error")
    assert (done.stdout, done.stderr) == ("fine\n", "")


BROKEN = {
    "unsupported torch": ("import torch; torch.__version__ = '2.9.1'; import torch_tpu",
                          {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "torch 2.9.1 is not supported; .* 2.13"),
    "no jax": ("""
import importlib.util, sys
theirs = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jax" else theirs(name, *rest)
import torch
""", {}, "JAX is not installed: pip install"),
    "something breaks": ("""
import sys
sys.modules["torch_tpu.device"] = None
import torch
""", {}, "not available"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_environment_costs_the_device_not_torch(name):
    import re

    code, environment, message = BROKEN[name]
    done = python(code + "\nprint(torch.ones(2).sum().item())", "-W", "error", **environment)
    assert done.stdout == "2.0\n", done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("torch_tpu: the tpu device is not available"), done.stderr
    assert re.search(message, lines[0]), done.stderr


@pytest.mark.parametrize("name, value, message", [
    ("PLATFORM", "gpu", "TORCH_TPU_PLATFORM='gpu' is not known; choose one of auto, tpu"),
    ("VIRTUAL_CHIPS", "no", "TORCH_TPU_VIRTUAL_CHIPS='no' must be a whole number of at least 1"),
    ("VIRTUAL_HBM", "much", "TORCH_TPU_VIRTUAL_HBM='much' is not a size"),
    ("INTEGRATIONS", "some", "TORCH_TPU_INTEGRATIONS='some' is neither on nor off"),
    ("HOST_INTEGERS", "few", "TORCH_TPU_HOST_INTEGERS='few' is neither on nor off"),
    ("LOGS", "compile,spam", "TORCH_TPU_LOGS='compile,spam': 'spam' is not known"),
])
def test_a_wrong_setting_is_an_error_of_the_first_use(name, value, message):
    done = python("""
        import torch
        print(torch.ones(2).sum().item(), torch.device("tpu"))
        for use in (lambda: torch.ones(1, device="tpu"), lambda: torch.ones(1).to("tpu"), lambda: torch.ones(1).tpu(),
                    torch.tpu.is_available, torch.accelerator.is_available, torch.tpu.device_count):
            try:
                use()
            except ValueError as error:
                print(error)
    """, "-W", "error", **{"TORCH_TPU_" + name: value})
    first, *others = done.stdout.splitlines()
    assert first == "2.0 tpu" and len(others) == 6 and all(message in line for line in others), done.stdout
    assert done.stderr == ""


def test_chips_demanded_that_are_not_there():
    done = python("""
        import torch
        print(torch.accelerator.is_available())
        try:
            torch.ones(1, device="tpu")
        except RuntimeError as error:
            print(error)
    """, TORCH_TPU_PLATFORM="tpu")
    lines = done.stdout.splitlines()
    assert lines[0] == "False" or "cannot start" in lines[1], done.stdout + done.stderr
    assert "libtpu" in lines[1] or "cannot start" in lines[1]


def test_a_forked_child_gets_an_error_not_a_hang():
    done = python("""
        import os, sys, torch
        x = torch.ones(64, 64, device="tpu")
        (x @ x).sum().item()
        child = os.fork()
        if not child:
            assert torch.tpu._is_in_bad_fork() and not torch.tpu.is_available()
            torch.manual_seed(3)
            for use in (lambda: x @ x, lambda: x.cpu(), lambda: torch.ones(3, device="tpu"), torch.tpu.synchronize):
                try:
                    use()
                except RuntimeError as error:
                    assert "spawn" in str(error), error
                else:
                    os._exit(3)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        print((x @ x)[0, 0].item())
    """, "-W", "error", timeout=60)
    assert (done.stdout, done.stderr) == ("64.0\n", ""), done.stdout + done.stderr


def test_a_child_forked_before_the_first_use_has_its_own_device():
    done = python("""
        import os, torch
        child = os.fork()
        value = (torch.ones(2, device="tpu") + 1).sum().item()
        if not child:
            os._exit(int(value))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        print(value)
    """, timeout=90)
    assert done.stdout == "4.0\n", done.stderr
