"""Small integer tensors that the host knows are computed on the host: the same values, no launches, no compiles."""

import copy
import os
import subprocess
import sys

import pytest
import torch

from torch_tpu.eager import bookkeeping
from torch_tpu.runtime import executable


@pytest.fixture(autouse=True)
def on():
    before = bookkeeping.set(True)
    yield
    bookkeeping.set(before)


def cost(fn):
    """Programs launched, and the result."""
    before = executable.STATISTICS.launches
    result = fn()
    return executable.STATISTICS.launches - before, result


def steps(device):
    """What a generation does with its ids, masks and positions."""
    ids = torch.tensor([[5, 7, 9], [2, 2, 4]]).to(device)
    mask = torch.ones(2, 3, dtype=torch.int64, device=device)
    mask[1, 0] = 0
    done = torch.zeros(2, dtype=torch.bool, device=device)
    for step in range(4):
        token = (ids[:, -1] * 3 + step) % 11
        token = torch.where(done, torch.full_like(token, 0), token)
        ids = torch.cat([ids, token[:, None]], dim=-1)
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=-1)
        positions = mask.cumsum(-1) - 1
        positions.masked_fill_(mask == 0, 1)
        done |= torch.isin(token, torch.tensor([4, 10], device=device))
        causal = torch.arange(8, device=device)[None, :] <= positions[:, -1:]
    return ids, mask, positions, done, causal, ids.t(), ids.argmax(-1), ids.sort(-1).values, ids.max(), ids.float(), \
        torch.nonzero(ids > 4), ids[mask.bool()], ids.to(torch.int32), mask.sum(dtype=torch.int32), ids / 2


def test_a_generation_without_a_launch():
    launches, got = cost(lambda: steps("tpu"))
    assert launches == 0
    for n, (here, there) in enumerate(zip(got, steps("cpu"))):
        assert here.device.type == "tpu" and here.dtype == there.dtype
        assert here.stride() == there.stride() or n == 10  # the CPU's nonzero is a transposed view
        torch.testing.assert_close(here.cpu(), there)


def test_reading_does_not_wait():
    launches, values = cost(lambda: (torch.arange(5, device="tpu") + 1).tolist())
    assert launches == 0 and values == [1, 2, 3, 4, 5]


def test_programs_get_what_the_host_wrote_last():
    table = torch.randn(10, 3).to("tpu")
    ids = torch.tensor([1, 2, 3]).to("tpu")
    first = table[ids]
    ids.add_(4)
    view = ids[1:]
    view.mul_(0)
    torch.testing.assert_close(table[ids].cpu(), table.cpu()[[5, 0, 0]])
    torch.testing.assert_close(first.cpu(), table.cpu()[[1, 2, 3]])
    ids.copy_(torch.tensor([9, 8, 7]))
    assert ids.tolist() == [9, 8, 7] and view.tolist() == [8, 7]
    view.copy_(torch.tensor([1, 1]))
    torch.testing.assert_close(table[ids].cpu(), table.cpu()[[9, 1, 1]])


def test_the_host_gets_what_programs_wrote_last():
    ids = torch.tensor([1, 2, 3]).to("tpu")

    @torch.compile(backend="tpu")
    def bump(t):
        t.add_(1)
        return t * 2

    assert (bump(ids).tolist(), ids.tolist(), (ids + 1).tolist()) == ([4, 6, 8], [2, 3, 4], [3, 4, 5])
    ids[0] = 10
    assert (bump(ids).tolist(), ids.tolist()) == ([22, 8, 10], [11, 4, 5])


def test_a_sampled_token_meets_the_ids():
    logits = torch.tensor([[0.1, 0.9, 0.2]]).to("tpu")
    ids = torch.tensor([[4, 5]]).to("tpu")
    compiled = executable.STATISTICS.compiled + executable.STATISTICS.loaded
    for n in range(3):
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], -1)
        assert ids.tolist() == [[4, 5] + [1] * (n + 1)]
    assert executable.STATISTICS.compiled + executable.STATISTICS.loaded - compiled <= 1


def test_large_and_computed_integers_stay_on_the_device():
    large = torch.ones(1 << 21, dtype=torch.int64).to("tpu")
    assert cost(lambda: large + 1)[0] == 1
    computed = torch.randn(300, 3).to("tpu").argmax(-1)
    assert cost(lambda: computed + 1)[0] == 1


def test_errors_are_those_of_the_cpu():
    x = torch.arange(4).to("tpu")
    for wrong in (lambda t: t // 0, lambda t: t + torch.arange(3).to(t.device), lambda t: t.index_select(0, t + 3),
                  lambda t: t.add_(0.5), lambda t: t.view(3)):
        with pytest.raises(Exception) as there:
            wrong(x.cpu())
        with pytest.raises(there.type):
            wrong(x)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.arange(4)


def test_copies_are_independent():
    x = torch.arange(4).to("tpu")
    kept = [x.clone(), copy.deepcopy(x), x.detach().clone(), x.to("tpu", copy=True), torch.empty_like(x).copy_(x)]
    host = x.cpu()
    source = torch.arange(4)
    moved = source.to("tpu")
    source.zero_()
    host.zero_()
    x.zero_()
    assert all(k.tolist() == [0, 1, 2, 3] for k in [*kept, moved])
    storage = torch.arange(4).to("tpu")
    other = torch.empty_like(storage)
    other.untyped_storage().copy_(storage.untyped_storage())
    storage.add_(1)
    assert (storage.tolist(), other.tolist()) == ([1, 2, 3, 4], [0, 1, 2, 3])


def test_memory_is_counted():
    before = torch.tpu.memory_allocated()
    x = torch.ones(1000, dtype=torch.int64, device="tpu")
    assert torch.tpu.memory_allocated() - before == 8000
    del x
    assert torch.tpu.memory_allocated() == before


def test_it_can_be_turned_off():
    code = ("import torch\nfrom torch_tpu.eager import bookkeeping\nx = torch.arange(4).to('tpu')\n"
            "print((x + 1).tolist(), bookkeeping.runs)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "TORCH_TPU_HOST_INTEGERS": "off"})
    assert done.stdout.split("\n")[0] == "[1, 2, 3, 4] 0", done.stdout + done.stderr
