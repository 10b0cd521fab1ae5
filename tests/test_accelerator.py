"""torch.accelerator, which ends in C++ that a Python backend has no part in."""

from __future__ import annotations

import pytest
import torch

acc = torch.accelerator


def test_which_accelerator():
    assert acc.is_available() and acc.device_count() == torch.tpu.device_count()
    assert acc.current_accelerator() == torch.device("tpu") == acc.current_accelerator(check_available=True)
    assert torch.get_device_module() is torch.tpu


def test_index():
    assert acc.current_device_index() == 0
    for device in (0, "tpu:0", torch.device("tpu", 0), -1):
        acc.set_device_index(device)
    with acc.device_index(0), acc.device_index(None):
        assert torch.ones(1, device="tpu").device.index == 0
    with pytest.raises(RuntimeError, match="one process drives one chip"):
        acc.set_device_index(1)
    with pytest.raises(RuntimeError, match="one process drives one chip"), acc.device_index(1):
        pass
    with pytest.raises(ValueError, match="expected a tpu device"):
        acc.set_device_index("cpu")


def test_streams():
    stream = torch.Stream(device="tpu")
    before = acc.current_stream()
    acc.set_stream(stream)
    try:
        assert acc.current_stream() is stream is acc.current_stream(0)
    finally:
        acc.set_stream(before)
    acc.synchronize()


def test_memory():
    acc.empty_cache()
    acc.empty_host_cache()
    before = acc.memory_allocated()
    tensor = torch.ones(1 << 18, device="tpu")
    assert acc.memory_allocated() - before == 1 << 20
    assert acc.max_memory_allocated() >= acc.memory_allocated()
    assert acc.memory_reserved() >= 0 and acc.max_memory_reserved() >= acc.memory_reserved()
    del tensor
    acc.reset_peak_memory_stats()
    assert acc.max_memory_allocated() == before
    acc.reset_accumulated_memory_stats()
    assert acc.memory_stats()["allocation.all.allocated"] == 0
    assert acc.get_memory_info() == torch.tpu.mem_get_info()


def test_capability():
    assert torch.float32 in acc.get_device_capability()["supported_dtypes"]
