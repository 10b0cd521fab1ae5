"""torch.tpu: what torch.cuda is for CUDA."""

from __future__ import annotations

import gc
import sys
import time

import pytest
import torch

from processes import python
from torch_tpu.runtime import chips


def test_the_module_is_importable_under_its_name():
    import torch.tpu

    assert sys.modules["torch.tpu"] is torch.tpu
    assert torch.get_device_module("tpu") is torch.tpu
    import torch.tpu.memory

    assert torch.tpu.memory.memory_allocated is torch.tpu.memory_allocated
    import torch.backends.tpu

    assert torch.backends.tpu.is_available() and torch.backends.tpu.is_built()
    assert torch.backends.tpu.version()["torch_tpu"]


def test_asking_for_the_device_starts_nothing():
    done = python("""
        import sys, torch, torch.tpu
        assert torch.tpu.is_available() and torch.tpu.device_count() == 1
        assert torch.tpu.is_initialized() and torch.tpu.current_device() == 0
        torch.manual_seed(3); torch.tpu.get_rng_state(); torch.tpu.synchronize(); torch.tpu.memory_allocated()
        torch.tpu.get_device_name(); torch.tpu.get_device_properties(); torch.accelerator.synchronize()
        assert "jax" not in sys.modules, "JAX was imported"
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", [None, 0, "tpu", "tpu:0", torch.device("tpu"), torch.device("tpu", 0)])
def test_every_way_to_name_the_chip(device):
    torch.tpu.set_device(device)
    torch.tpu.synchronize(device)
    with torch.tpu.device(device):
        assert torch.tpu.current_device() == 0
    assert torch.tpu.get_device_name(device) == torch.tpu.get_device_properties(device).name
    assert torch.tpu.memory_allocated(device) >= 0
    torch.accelerator.synchronize(device)


@pytest.mark.parametrize("device", [1, "tpu:1", torch.device("tpu", 1), -1])
def test_another_chip_is_refused(device):
    for ask in (torch.tpu.set_device, torch.tpu.device, torch.tpu.synchronize, torch.tpu.mem_get_info):
        with pytest.raises(RuntimeError, match="one process drives one chip"):
            ask(device)


def test_another_kind_of_device_is_refused():
    with pytest.raises(ValueError, match="expected a tpu device, got cpu"):
        torch.tpu.set_device("cpu")


def test_several_virtual_chips(monkeypatch):
    done = python("""
        import torch
        print(torch.accelerator.is_available(), torch.accelerator.device_count())
        for call in (lambda: torch.ones(1, device="tpu:1"), lambda: torch.ones(1).to("tpu:1"),
                     lambda: torch.accelerator.set_device_index(1), lambda: torch.Generator("tpu:1")):
            try:
                call(); print("no error")
            except RuntimeError as error:
                assert "torchrun --nproc-per-node=4" in str(error), error
        print((torch.ones(1, device="tpu") + 1).item())
    """, TORCH_TPU_VIRTUAL_CHIPS="4")
    assert done.stdout.split("\n") == ["True 4", "2.0", ""], done.stdout + done.stderr


def test_device_of():
    with torch.tpu.device_of(torch.ones(1)), torch.tpu.device_of(torch.ones(1, device="tpu")):
        pass


def test_properties():
    properties = torch.tpu.get_device_properties()
    assert properties.total_memory > 0 and properties.virtual and properties.platform == "cpu"
    with pytest.raises(AttributeError):
        properties.name = "other"
    assert torch.bfloat16 in torch.tpu.get_device_capability()["supported_dtypes"]
    assert torch.tpu.is_bf16_supported() is True


def test_memory_statistics():
    gc.collect()
    torch.tpu.reset_peak_memory_stats()
    start = torch.tpu.memory_stats()
    before = torch.tpu.memory_allocated()
    tensor = torch.ones(1 << 18, device="tpu")
    assert torch.tpu.memory_allocated() == before + (1 << 20)
    assert torch.tpu.max_memory_allocated() >= before + (1 << 20)
    del tensor
    assert torch.tpu.memory_allocated() == before
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == before
    stats = torch.tpu.memory_stats()
    assert stats["allocated_bytes.all.current"] == before == torch.tpu.memory_reserved()
    for counter in ("allocated", "freed"):  # since the process began or another test reset them
        assert stats[f"allocated_bytes.all.{counter}"] - start[f"allocated_bytes.all.{counter}"] >= 1 << 20
    assert stats["allocated_bytes.all.allocated"] - stats["allocated_bytes.all.freed"] == (
        start["allocated_bytes.all.allocated"] - start["allocated_bytes.all.freed"])
    torch.tpu.reset_accumulated_memory_stats()
    assert torch.tpu.memory_stats()["allocated_bytes.all.allocated"] == 0
    free, total = torch.tpu.mem_get_info()
    assert free == total - before
    assert "live tensors" in torch.tpu.memory_summary()
    torch.tpu.empty_cache()


def test_streams():
    stream = torch.tpu.Stream()
    assert isinstance(stream, torch.Stream) and stream.device == torch.device("tpu", 0)
    assert torch.tpu.current_stream() == torch.tpu.default_stream() != stream
    with torch.tpu.stream(stream):
        assert torch.tpu.current_stream() is stream is torch.accelerator.current_stream()
        result = torch.ones(4, device="tpu") * 2
    assert torch.tpu.current_stream() == torch.tpu.default_stream()
    with stream:
        assert torch.tpu.current_stream() is stream
    with torch.tpu.stream(None):
        pass
    stream.wait_stream(torch.tpu.current_stream())
    stream.wait_event(stream.record_event())
    stream.synchronize()
    assert stream.query() and result.tolist() == [2, 2, 2, 2]
    torch.tpu.set_stream(stream)
    assert torch.tpu.current_stream() is stream
    torch.tpu.set_stream(torch.tpu.default_stream())


def test_events_measure_time():
    begin, end = (torch.tpu.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="recorded"):
        begin.elapsed_time(end)
    begin.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert end.query() and 15 < begin.elapsed_time(end) < 2000
    with pytest.raises(ValueError, match="enable_timing"):
        torch.tpu.Event().elapsed_time(end)


def test_generic_streams_and_events():
    assert isinstance(torch.Stream(device="tpu"), torch.tpu.Stream)
    assert isinstance(torch.Stream(), torch.tpu.Stream)
    event = torch.Event(device="tpu", enable_timing=True)
    assert isinstance(event, torch.tpu.Event) and isinstance(event, torch.Event)
    event.record(torch.Stream(device="tpu"))
    event.wait()
    event.synchronize()
    assert issubclass(torch.tpu.Stream, torch.Stream) and issubclass(torch.tpu.Event, torch.Event)
    assert not isinstance(3, torch.Stream) and not issubclass(int, torch.Event)


@pytest.mark.parametrize(("name", "instead"), [("CUDAGraph", "torch.compile"), ("nvtx", "record_function"),
                                               ("amp", "torch.amp.autocast"), ("utilization", "tpu-info")])
def test_what_cuda_has_and_tpu_has_not(name, instead):
    with pytest.raises(AttributeError, match=instead):
        getattr(torch.tpu, name)
    assert not hasattr(torch.tpu, name)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        _ = torch.tpu.nothing_like_it


def test_fallback_report_counts():
    from torch_tpu.eager import fallback

    torch.ones(1, device="tpu")
    before = fallback.mode()
    torch.tpu.set_fallback("silent")
    fallback.on_cpu(torch.ops.aten.neg.default, (torch.ones(2, device="tpu"),), {})
    assert torch.tpu.fallback_report()["aten.neg.default"] >= 1
    fallback.set_mode(before)
    with pytest.raises(ValueError, match="not known"):
        torch.tpu.set_fallback("loud")


def test_check_gives_the_index():
    assert chips.check("tpu") == 0
