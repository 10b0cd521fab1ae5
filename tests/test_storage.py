"""torch.UntypedStorage and TypedStorage on the device, byte for byte as on the CPU."""

from __future__ import annotations

import copy
import io

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float16, torch.uint8,
          torch.float64, torch.float8_e4m3fn]


def values(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.tensor([0, 1, 2, 3, 5, 8])
    return numbers.to(dtype)


def test_made_of_nothing_and_of_numbers():
    empty = torch.UntypedStorage(device="tpu")
    assert (len(empty), empty.nbytes(), empty.device) == (0, 0, torch.device("tpu", 0))
    assert torch.UntypedStorage(5, device="tpu").tolist() == [0] * 5
    assert torch.UntypedStorage([1, 2, 255], device="tpu").tolist() == [1, 2, 255]
    assert isinstance(torch.UntypedStorage(3, device=0), torch.UntypedStorage)
    assert torch.UntypedStorage(4).device.type == "cpu"
    with pytest.raises(RuntimeError, match="one process drives one chip"):
        torch.UntypedStorage(3, device="tpu:1")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_go_both_ways(dtype):
    host = values(dtype)
    storage = host.to("tpu").untyped_storage()
    want = host.untyped_storage()
    assert storage.nbytes() == storage.size() == len(storage) == want.nbytes()
    assert storage.tolist() == list(storage) == want.tolist()
    assert storage.cpu().tolist() == want.tolist()
    back = torch.UntypedStorage(want.nbytes(), device="tpu").copy_(want)
    tensor = torch.empty(0, dtype=dtype, device="tpu").set_(back)
    assert torch.equal(tensor.cpu().view(torch.uint8) if dtype.itemsize == 1 else tensor.cpu(),
                       host.view(torch.uint8) if dtype.itemsize == 1 else host)
    assert tensor.data_ptr() == back.data_ptr()


def test_bytes_and_their_tensors_see_each_other():
    tensor = torch.tensor([1.0, 2.0, 3.0]).to("tpu")
    storage = tensor.untyped_storage()
    storage.fill_(0)
    assert tensor.tolist() == [0, 0, 0]
    storage[3] = 63
    storage[2] = 128
    assert storage[3] == 63 and tensor.tolist() == [1.0, 0, 0]
    storage[4:8] = 0
    storage.copy_(torch.tensor([4.0, 5.0, 6.0]).untyped_storage())
    assert tensor.tolist() == [4, 5, 6]
    with pytest.raises(NotImplementedError, match="slice"):
        storage[1:2]
    with pytest.raises(RuntimeError, match="size does not match, self was 12 bytes but src was 4 bytes"):
        storage.copy_(torch.UntypedStorage(4))


def test_copies_are_independent():
    tensor = torch.arange(4.0).to("tpu")
    twin = tensor.untyped_storage().clone()
    other = torch.empty(0, device="tpu").set_(twin)
    other.add_(1)
    tensor.mul_(10)
    other.add_(1)
    assert tensor.tolist() == [0, 10, 20, 30] and other.tolist() == [2, 3, 4, 5]
    assert copy.deepcopy(twin).tolist() == copy.copy(twin).tolist() == twin.cpu().tolist()
    host = torch.UntypedStorage(16)
    host.copy_(twin)
    assert host.tolist() == twin.tolist()
    assert twin.new().nbytes() == 0 and twin.new().device.type == "tpu"


def test_moves():
    storage = torch.arange(4.0).untyped_storage()
    there = storage.to(device="tpu")
    assert there.device.type == "tpu" and there.to(device="cpu", non_blocking=True).tolist() == storage.tolist()
    assert there.to(device="tpu") is there
    assert there.is_pinned() is False


def test_emptied_and_taken_again():
    before = torch.tpu.memory_allocated()
    tensor = torch.arange(1024.0).to("tpu")
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == storage.size() == 0 and torch.tpu.memory_allocated() == before
    with pytest.raises(RuntimeError, match="resized to 0 bytes"):
        (tensor + 1).cpu()
    storage.resize_(4096)
    assert storage.nbytes() == 4096 and torch.tpu.memory_allocated() == before + 4096
    tensor.copy_(torch.ones(1024))
    assert tensor.sum().item() == 1024
    with pytest.raises(RuntimeError, match=r"cannot be resized to 4097.*tensor\.resize_"):
        storage.resize_(4097)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_typed():
    storage = torch.TypedStorage(3, dtype=torch.int32, device="tpu", _internal=True)
    storage._setitem(slice(0, 3), 7)
    assert [storage._getitem(i) for i in range(3)] == [7, 7, 7]
    assert storage._size() == 3 and storage.pickle_storage_type() == "IntStorage"


def test_saved():
    storage = torch.tensor([1.0, 2.0]).to("tpu").untyped_storage()
    file = io.BytesIO()
    torch.save(storage, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again.device.type == "tpu" and again.tolist() == storage.tolist()


def test_byteswap_and_repr():
    storage = torch.tensor([1, 256], dtype=torch.int16).to("tpu").untyped_storage()
    storage.byteswap(torch.int16)
    assert storage.tolist() == [0, 1, 1, 0]
    assert "device=tpu:0" in repr(storage)


def test_not_for_another_process():
    with pytest.raises(RuntimeError, match=r"send tensor\.cpu\(\)"):
        torch.ones(2, device="tpu").untyped_storage()._share_fd_cpu_()


def test_unique_addresses():
    tensors = [torch.empty(n, device="tpu") for n in (0, 1, 1000)]
    addresses = {t.untyped_storage().data_ptr() for t in tensors}
    assert len(addresses) == 3 and 0 not in addresses
    assert tensors[2][10:].data_ptr() == tensors[2].data_ptr() + 40


def test_cpu_storages_are_untouched():
    storage = torch.UntypedStorage(4)
    storage.fill_(3)
    storage[0] = 9
    assert storage.tolist() == [9, 3, 3, 3] and storage[1:3].tolist() == [3, 3]
    storage.resize_(8)
    assert storage.nbytes() == 8 and storage.clone().nbytes() == 8
