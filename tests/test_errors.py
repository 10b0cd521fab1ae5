"""A wrong input each: the message says what, why and what to do, and the process lives on."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from processes import python


@pytest.fixture(autouse=True)
def lives_on():
    yield
    assert (torch.ones(2, device="tpu") + 1).tolist() == [2, 2]


@pytest.mark.parametrize("make", [
    lambda: torch.empty(2, dtype=torch.complex32, device="tpu"),
    lambda: torch.zeros(2, dtype=torch.complex32).to("tpu"),
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).to("tpu"),
], ids=["empty", "complex32", "quantized"])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_unsupported_dtypes(make):
    with pytest.raises((TypeError, NotImplementedError), match=r"not supported on tpu.*convert"):
        make()


@pytest.mark.parametrize("mix", [lambda d, c: d + c, lambda d, c: c + d, lambda d, c: d @ c, lambda d, c: d.add_(c),
                                 lambda d, c: torch.cat([d, c]), lambda d, c: torch.nn.functional.linear(d, c)],
                         ids=["add", "radd", "mm", "inplace", "cat", "linear"])
def test_mixed_devices(mix):
    with pytest.raises(RuntimeError, match=r"(?s)(?=.*tpu)(?=.*cpu)"):
        mix(torch.ones(2, 2, device="tpu"), torch.ones(2, 2))


@pytest.mark.parametrize("use", [lambda: torch.ones(1, device="tpu:1"), lambda: torch.ones(1).to("tpu:1"),
                                 lambda: torch.empty(1, device="tpu:1"), lambda: torch.rand(1, device="tpu:1"),
                                 lambda: torch.arange(3, device="tpu:1"), lambda: torch.ones(1).tpu(1),
                                 lambda: torch.tensor([1.0], device="tpu:1"),
                                 lambda: torch.nn.Linear(1, 1).to("tpu:1"),
                                 lambda: torch.zeros_like(torch.ones(1, device="tpu"), device="tpu:1")])
def test_another_chip(use):
    with pytest.raises(RuntimeError, match="tpu:1 does not exist: this host has 1 chip"):
        use()


def test_out_of_memory():
    done = python("""
        import torch
        kept = torch.ones(1 << 20, device="tpu")
        for ask in (lambda: torch.empty(1 << 26, device="tpu"), lambda: torch.ones(1 << 26, device="tpu"),
                    lambda: torch.ones(1 << 26).to("tpu"), lambda: kept.repeat(64)):
            try:
                ask()
            except torch.OutOfMemoryError as error:
                assert "64.0 MiB" in str(error) and "TORCH_TPU_VIRTUAL_HBM" in str(error), error
            else:
                raise SystemExit("no error")
        assert torch.tpu.memory_allocated() == 4 << 20, torch.tpu.memory_allocated()
        assert torch.tpu.memory_stats()["num_ooms"] == 4 and torch.tpu.mem_get_info() == (60 << 20, 64 << 20)
        print((kept + 1).sum().item())
    """, TORCH_TPU_VIRTUAL_HBM="64M")
    assert done.stdout == "2097152.0\n", done.stdout + done.stderr


def test_a_missing_operator_in_strict_mode(no_fallback):
    from torch_tpu.eager import fallback
    from torch_tpu.runtime import errors

    with pytest.raises(errors.UnsupportedOperatorError, match=r"aten\.neg.*TORCH_TPU_FALLBACK=error"):
        fallback.on_cpu(torch.ops.aten.neg.default, (torch.ones(1, device="tpu"),), {})


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/proc/self"), reason="needs /proc")
def test_a_cache_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = python("""
        import torch
        print((torch.ones(3, device="tpu") * 3).tolist())
    """, TORCH_TPU_CACHE_DIR=str(blocked / "cache"))
    assert done.stdout == "[3.0, 3.0, 3.0]\n", done.stderr
    assert done.stderr.count("cannot be kept") == 1 and "TORCH_TPU_CACHE_DIR" in done.stderr


def test_the_cache_folder_is_the_users_own(tmp_path):
    done = python("import torch; (torch.ones(3, device='tpu') * 3).tolist()", TORCH_TPU_CACHE_DIR=str(tmp_path / "c"))
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700


def test_sparse_and_pinned():
    with pytest.raises(NotImplementedError, match=r"sparse tensors are not supported on tpu.*to_dense"):
        torch.empty(2, 2, layout=torch.sparse_coo, device="tpu")
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, pin_memory=True, device="tpu")


def test_a_tensor_made_elsewhere():
    foreign = torch._C._acc.create_empty_tensor((2,), torch.float32)
    with pytest.raises(RuntimeError, match="no device memory behind it"):
        foreign + 1
