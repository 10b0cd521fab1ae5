"""Data loading beside a running device, and state that is saved, loaded, copied and moved."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import tempfile

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

nn = torch.nn
pytestmark = pytest.mark.usefixtures("no_fallback")


class Squares(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int):
        return {"x": torch.full((3,), float(index)), "y": index * index, "name": f"n{index}"}


class Stream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        yield from range(worker.id if worker else 0, 8, worker.num_workers if worker else 1)


@pytest.fixture
def started():
    """The device is in use before the workers start."""
    return (torch.ones(4, device="tpu") @ torch.ones(4, device="tpu")).item()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True},
                                     {"num_workers": 2, "pin_memory": True}, {"pin_memory": True},
                                     {"num_workers": 1, "prefetch_factor": 4}])
def test_loader(started, options):
    loader = DataLoader(Squares(), batch_size=4, timeout=60 if "num_workers" in options else 0, **options)
    for _ in range(2):
        seen = []
        for batch in loader:
            x = batch["x"].to("tpu", non_blocking=True)
            seen += (x.sum(1) / 3).tolist()
            assert (x[:, 0] ** 2).tolist() == batch["y"].tolist()
        assert seen == list(range(12))


def test_iterable_and_collate(started):
    loader = DataLoader(Stream(), batch_size=2, num_workers=2, timeout=60, collate_fn=lambda items: torch.tensor(items))
    assert sorted(v for batch in loader for v in batch.to("tpu").tolist()) == list(range(8))


class OnDevice(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2, device="tpu") * index


def test_worker_that_uses_the_device_is_told_what_to_do(started):
    with pytest.raises(RuntimeError, match=r"(?i)fork"):
        next(iter(DataLoader(OnDevice(), num_workers=1, timeout=60)))


def test_tensor_dataset_on_the_device():
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    data = TensorDataset(x.to("tpu"), y.to("tpu"))
    assert data[3][0].tolist() == [6, 7]
    generator = torch.Generator().manual_seed(0)
    got = [(a.cpu(), b.cpu()) for a, b in DataLoader(data, batch_size=4, shuffle=True, generator=generator)]
    want = list(DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=generator.manual_seed(0)))
    for (a, b), (c, d) in zip(got, want):
        assert torch.equal(a, c) and torch.equal(b, d)


def test_spawned_process_uses_the_device_of_its_own():
    code = ("import torch, torch.multiprocessing as mp\n"
            "def work(rank, q): q.put((torch.ones(2, device='tpu') * 3).tolist())\n"
            "if __name__ == '__main__':\n"
            "    torch.ones(2, device='tpu')\n"
            "    q = mp.get_context('spawn').SimpleQueue()\n"
            "    mp.spawn(work, args=(q,), nprocs=1)\n"
            "    print(q.get())\n")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        out = subprocess.run([sys.executable, file.name], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "[3.0, 3.0]", out.stderr[-2000:]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


def model_on(device: str) -> Tied:
    torch.manual_seed(0)
    return Tied().to(device)


IDS = torch.tensor([1, 2, 3, 1])


@pytest.mark.parametrize("places", [("tpu", "cpu"), ("cpu", "tpu"), ("tpu", "tpu")])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(places, assign):
    first, second = places
    source, target = model_on(first), model_on(second)
    with torch.no_grad():
        source.embedding.weight.add_(1)
    state = source.state_dict()
    if assign:
        state = {k: v.to(second) for k, v in state.items()}
    assert target.load_state_dict(state, assign=assign) == ([], [])
    if assign:
        target.head.weight = target.embedding.weight
    torch.testing.assert_close(target(IDS.to(second)).cpu(), source(IDS.to(first)).cpu(), rtol=1e-4, atol=1e-5)
    assert {v.device.type for v in target.state_dict().values()} == {second}


@pytest.mark.parametrize("options", [{}, {"map_location": "cpu"}, {"map_location": "tpu"}, {"map_location": "tpu:0"},
                                     {"map_location": {"tpu:0": "cpu"}}, {"weights_only": False}])
def test_save_and_load(options):
    source = model_on("tpu")
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, **options)
    device = {"cpu": "cpu", "tpu": "tpu", "tpu:0": "tpu"}.get(str(options.get("map_location", "tpu")), "cpu")
    for name, value in source.state_dict().items():
        assert loaded[name].device.type == device
        assert torch.equal(loaded[name].cpu(), value.cpu())
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()


def test_safetensors(tmp_path):
    from safetensors.torch import load_file, load_model, save_file, save_model

    source = model_on("tpu")
    path = str(tmp_path / "model.safetensors")
    save_model(source, path)
    target = model_on("tpu")
    with torch.no_grad():
        for p in target.parameters():
            p.zero_()
    missing, unexpected = load_model(target, path, device="tpu")
    assert not missing and not unexpected
    assert torch.equal(target.embedding.weight.cpu(), source.embedding.weight.cpu())
    values = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3).to("tpu"), "b": torch.tensor(3).to("tpu"),
              "c": torch.tensor([True, False]).to("tpu"), "e": torch.ones(0, 2).to("tpu")}
    save_file(values, path, metadata={"note": "x"})
    for device in ("tpu", "tpu:0", "cpu"):
        loaded = load_file(path, device=device)
        for name, value in values.items():
            assert loaded[name].device.type == device[:3] and loaded[name].dtype == value.dtype
            assert torch.equal(loaded[name].cpu(), value.cpu())
    loaded = load_file(path, device="tpu")
    assert (loaded["a"] * 2).tolist() == [[0, 2, 4], [6, 8, 10]]


def test_distributed_checkpoint_of_one_process(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(4, 3, device="tpu")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(0)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(tmp_path), no_dist=True)
    other, others = trained(1)
    weights, state = get_state_dict(other, others)
    into = {"model": weights, "optimizer": state}
    dcp.load(into, checkpoint_id=str(tmp_path), no_dist=True)
    set_state_dict(other, others, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    assert torch.equal(other.weight.cpu(), model.weight.cpu())
    for p, q in zip(model.parameters(), other.parameters()):
        assert others.state[q]["exp_avg"].device.type == "tpu"
        assert torch.equal(others.state[q]["exp_avg"].cpu(), optimizer.state[p]["exp_avg"].cpu())


def test_deepcopy_of_a_module_with_hooks_and_ties():
    model = model_on("tpu")
    calls = []
    model.norm.register_forward_hook(lambda m, i, o: calls.append(m) or o * 2)
    model.embedding.weight.note = "kept"
    other = copy.deepcopy(model)
    assert other.head.weight is other.embedding.weight and other.head.weight is not model.head.weight
    assert other.head.weight.data_ptr() != model.head.weight.data_ptr()
    ids = IDS.to("tpu")
    want = model(ids)
    torch.testing.assert_close(other(ids), want)
    assert calls == [model.norm, other.norm]
    with torch.no_grad():
        other.head.weight.zero_()
    assert model.head.weight.abs().sum().item() > 0
    assert other.scratch.device.type == "tpu" and other.table.tolist() == [0, 1, 2]
    memo: dict = {}
    a = torch.ones(3, device="tpu")
    pair = copy.deepcopy([a, a[1:]], memo)
    pair[0][1] = 5
    assert pair[1].tolist() == [5, 1] and a.tolist() == [1, 1, 1]


@pytest.mark.parametrize("places", [("cpu", "tpu"), ("tpu", "cpu")])
def test_parameter_data_between_devices(places):
    first, second = places
    p = nn.Parameter(torch.ones(3, device=first))
    holder = [p]
    p.data = torch.arange(4.0, device=second)
    assert holder[0] is p and p.device.type == second and p.tolist() == [0, 1, 2, 3]
    p.sum().backward()
    assert p.grad.device.type == second


@pytest.mark.parametrize("places", [("cpu", "tpu"), ("tpu", "cpu")])
def test_tensor_data_between_devices_is_torchs_error(places):
    first, second = places
    t = torch.ones(3, device=first)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        t.data = torch.arange(4.0, device=second)
    assert t.device.type == first and t.tolist() == [1, 1, 1]


def test_tensor_data_on_the_device():
    t = torch.ones(3, device="tpu")
    other = torch.zeros(2, 2, device="tpu")
    t.data = other
    assert t.data_ptr() == other.data_ptr() and t.shape == (2, 2)
    other.add_(1)
    assert t.tolist() == [[1, 1], [1, 1]]


def test_module_moves_there_and_back():
    model = model_on("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.embedding.weight.detach().clone()
    model.to("tpu")
    assert model.head.weight is model.embedding.weight
    model(IDS.to("tpu")).sum().backward()
    optimizer.step()
    model.to("cpu", torch.float64)
    assert model.head.weight is model.embedding.weight and model.embedding.weight.dtype == torch.float64
    assert not torch.equal(model.embedding.weight.float(), before)
    assert model.table.dtype == torch.int64


def test_map_of_everything_that_holds_tensors():
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]).to("tpu")
    assert packed.data.device.type == "tpu"
    data = torch.utils.data.default_convert({"a": [torch.ones(2)]})
    assert data["a"][0].to("tpu").tolist() == [1, 1]
    batch = torch.utils.data.default_collate([torch.ones(2, device="tpu"), torch.zeros(2, device="tpu")])
    assert batch.device.type == "tpu" and batch.tolist() == [[1, 1], [0, 0]]
