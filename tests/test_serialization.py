"""torch.save, torch.load, pickle and deepcopy of device tensors."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile

import pytest
import torch
from torch import nn

from processes import python

TENSORS = {
    "f32": torch.randn(3, 4), "bf16": torch.randn(5).bfloat16(), "i64": torch.arange(4) * 2**40,
    "bool": torch.tensor([True, False]), "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5),
    "c64": torch.randn(3, dtype=torch.complex64), "transposed": torch.arange(6.0).view(2, 3).t(),
    "f8": torch.randn(4).to(torch.float8_e5m2), "u16": torch.tensor([1, 65535], dtype=torch.uint16),
}


def saved(thing, **options) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file, **options)
    file.seek(0)
    return file


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.stride() == want.stride()
    assert torch.equal(got.cpu().float() if want.dtype.itemsize == 1 else got.cpu(),
                       want.float() if want.dtype.itemsize == 1 else want)


LOCATIONS = [(None, "tpu"), ("cpu", "cpu"), ("tpu", "tpu"), ("tpu:0", "tpu"), (torch.device("tpu"), "tpu"),
             (torch.device("cpu"), "cpu"), ({"tpu:0": "cpu"}, "cpu"), (lambda storage, where: storage.cpu(), "cpu"),
             (lambda storage, where: None, "tpu")]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(("location", "where"), LOCATIONS, ids=[str(i) for i in range(len(LOCATIONS))])
def test_every_map_location(location, where, weights_only):
    file = saved({name: tensor.to("tpu") for name, tensor in TENSORS.items()})
    for name, tensor in torch.load(file, map_location=location, weights_only=weights_only).items():
        assert tensor.device.type == where, name
        same(tensor, TENSORS[name])


def test_a_cpu_file_onto_the_device():
    for name, tensor in torch.load(saved(TENSORS), map_location="tpu", weights_only=True).items():
        assert tensor.device.type == "tpu"
        same(tensor, TENSORS[name])


def test_mapped_file():
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save({"a": torch.arange(5.0).to("tpu")}, file.name)
        assert torch.load(file.name, mmap=True, map_location="tpu", weights_only=True)["a"].tolist() == [0, 1, 2, 3, 4]


def test_old_format():
    file = saved({"a": torch.arange(5.0).to("tpu")}, _use_new_zipfile_serialization=False)
    got = torch.load(file, weights_only=True)["a"]
    assert got.device.type == "tpu" and got.tolist() == [0, 1, 2, 3, 4]


def test_views_share_storage_after_load():
    base = torch.arange(12.0).to("tpu")
    got = torch.load(saved({"part": base[2:6], "column": base.view(3, 4)[:, 1], "base": base}), weights_only=True)
    got["base"][3] = -1
    assert got["part"].tolist() == [2, -1, 4, 5] and got["column"].tolist() == [1, 5, 9]


def test_a_loaded_weight_is_not_reinterpreted_at_every_use():
    from torch_tpu.tensor import buffer

    loaded = torch.load(saved(torch.randn(3, 4).to("tpu")), weights_only=True)
    assert buffer.of(loaded).shape == (3, 4) and str(buffer.of(loaded).dtype) == "float32"


def test_another_index_is_refused():
    with pytest.raises(RuntimeError, match=r"tpu"):
        torch.load(saved(torch.ones(1).to("tpu")), map_location="tpu:7", weights_only=True)


def test_a_file_opens_without_the_backend():
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save({"t": torch.arange(3, device="tpu")}, file.name)
        done = python(f"""
            import torch
            assert torch.load({file.name!r}, map_location="cpu", weights_only=True)["t"].tolist() == [0, 1, 2]
            try:
                torch.load({file.name!r}, weights_only=True)
            except RuntimeError as error:
                assert "tpu" in str(error); print("refused")
        """, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "refused\n", done.stderr


def test_pickle_and_deepcopy_of_tensors():
    base = torch.arange(12.0).view(3, 4).to("tpu")
    for tensor in (base, base.t(), base[1:, ::2]):
        for again in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
            assert again.stride() == tensor.stride() and torch.equal(again.cpu(), tensor.cpu())
            again.add_(1)
            assert not torch.equal(again.cpu(), tensor.cpu())


def test_deepcopy_keeps_aliases_flags_and_gradients():
    tensor = torch.ones(4, device="tpu")
    twin = copy.deepcopy({"x": tensor, "y": tensor[:2]})
    twin["x"].mul_(5)
    assert twin["y"].tolist() == [5, 5] and tensor.tolist() == [1, 1, 1, 1]
    parameter = copy.deepcopy(nn.Parameter(torch.ones(3, device="tpu")))
    assert isinstance(parameter, nn.Parameter) and parameter.is_leaf and parameter.requires_grad
    leaf = torch.ones(3, device="tpu", requires_grad=True)
    leaf.grad = torch.full((3,), 2.0, device="tpu")
    again = copy.deepcopy(leaf)
    assert again.is_leaf and again.grad is not leaf.grad
    assert again.grad.tolist() == [2, 2, 2]


def test_modules_and_optimizers():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to("tpu")
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3, device="tpu")).sum().backward()
    optimizer.step()
    state = torch.load(saved({"m": module.state_dict(), "o": optimizer.state_dict()}), weights_only=True)
    fresh = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to("tpu")
    fresh.load_state_dict(state["m"])
    again = torch.optim.AdamW(fresh.parameters())
    again.load_state_dict(state["o"])
    for one, two in zip(module.parameters(), fresh.parameters()):
        assert torch.equal(one.detach().cpu(), two.detach().cpu()) and two.device.type == "tpu"
        assert again.state[two]["exp_avg"].device.type == "tpu"
    assert pickle.loads(pickle.dumps(module))[0].weight.is_tpu
    assigned = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to("meta")
    assigned.load_state_dict(state["m"], assign=True)
    assert assigned[0].weight.is_tpu


def test_numpy_and_lists():
    import numpy as np

    tensor = torch.arange(4.0).to("tpu")
    for convert in (lambda: tensor.numpy(), lambda: np.asarray(tensor)):
        with pytest.raises(TypeError, match=r"can't convert tpu:0 device type tensor to numpy\. Use Tensor\.cpu\(\)"):
            convert()
    assert tensor.numpy(force=True).tolist() == tensor.tolist() == [0, 1, 2, 3]
    assert torch.tensor([tensor[1], tensor[3]]).tolist() == [1, 3]
    assert torch.tensor(list(tensor)).tolist() == [0, 1, 2, 3]


def test_printing_compiles_nothing():
    from torch_tpu.runtime import executable

    tensor = torch.arange(3000.0).to("tpu")
    before = executable.STATISTICS.launches
    assert repr(tensor) == repr(tensor.cpu()).replace(")", ", device='tpu:0')")
    assert repr(tensor[2:4]) == "tensor([2., 3.], device='tpu:0')"
    assert repr(tensor.view(30, 100).t()[0, 1]) == "tensor(100., device='tpu:0')"
    assert "requires_grad=True" in repr(tensor.detach().requires_grad_())
    assert "device='tpu:0'" in repr(torch.empty(0, 3, device="tpu"))
    assert executable.STATISTICS.launches == before
