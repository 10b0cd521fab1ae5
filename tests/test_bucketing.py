"""options={"bucketing": ...}: few programs for all sizes of a dimension, with the results of each size; refused where a
row may depend on another."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def _programs():
    return list(torch.tpu.compiler.stats().graphs)


def _run(function, make, sizes, bucketing=True):
    """Calls for each size; the programs that were compiled."""
    compiled = torch.compile(function, backend="tpu", options={"bucketing": bucketing})
    before = len(_programs())
    with torch.no_grad():
        for size in sizes:
            args = make(size)
            expected = function(*args)
            moved = [arg.to("tpu") for arg in args]
            torch._dynamo.mark_dynamic(moved[0], 0)
            got = compiled(*moved)
            assert got.shape == expected.shape and got.stride() == expected.stride()
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    return _programs()[before:]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.attention = torch.nn.Linear(16, 48)
        self.norm = torch.nn.LayerNorm(16)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))

    def forward(self, ids, weights):
        x = self.embed(ids)
        q, k, v = (part.view(*part.shape[:2], 2, 8).transpose(1, 2) for part in self.attention(x).split(16, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + mixed.transpose(1, 2).reshape(*x.shape))
        return torch.softmax((x + self.mlp(x)).mean(1) * weights, -1)


def test_batches_of_a_transformer_share_programs():
    cpu = Block().eval()
    tpu = Block().eval()
    tpu.load_state_dict(cpu.state_dict())
    tpu.to("tpu")
    compiled = torch.compile(tpu, backend="tpu", dynamic=True, options={"bucketing": True})
    before = len(_programs())
    with torch.no_grad():
        for batch in (32, 17, 30, 9, 31, 12, 16, 5):
            ids, weights = torch.randint(0, 50, (batch, 7)), torch.rand(16)
            got = compiled(ids.to("tpu"), weights.to("tpu"))
            torch.testing.assert_close(got.cpu(), cpu(ids, weights), rtol=1e-4, atol=1e-5)
    made = _programs()[before:]
    assert len(made) == 3, [record.cause for record in made]  # 32, 16, 8


def test_the_last_partial_batch_of_convolutions():
    def f(x, weight, bias):
        x = torch.nn.functional.max_pool2d(torch.relu(torch.nn.functional.conv2d(x, weight, bias)), 2)
        return torch.nn.functional.log_softmax(x.flatten(1), -1)

    made = _run(f, lambda n: (torch.randn(n, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)), (64, 41, 64, 33),
                bucketing=[64])
    assert len(made) == 1


def test_buckets_of_ones_own_and_sizes_above_them():
    made = _run(lambda x, y: x @ y + 1, lambda n: (torch.randn(n, 4), torch.randn(4, 3)), (5, 7, 10, 11, 20),
                bucketing=[10, 6])
    assert len(made) == 4  # 6, 10, and 11 and 20 as they are


@pytest.mark.parametrize("function, why", [
    (lambda x: x - x.mean(0), "aten.mean.dim"),
    (lambda x: x.t() @ x, "aten.mm"),
    (lambda x: x * x.shape[0], "computes with the size|aten.mul"),
    (lambda x: x.cumsum(0), "aten.cumsum"),
    (lambda x: x.flip(0), "aten.flip"),
    (lambda x: torch.cat([x, x]), "aten.cat|shape"),
    (lambda x: x.sort(0).values, "aten.sort"),
    (lambda x: x.softmax(0), "aten._softmax"),
    (lambda x: x[1:] * 2, "aten.slice|shape"),
], ids=["mean", "product", "size", "cumsum", "flip", "cat", "sort", "softmax", "slice"])
def test_rows_that_depend_on_each_other_are_not_padded(function, why):
    import re

    made = _run(function, lambda n: (torch.randn(n, 4),), (5, 7, 11))
    assert len(made) == 3
    assert all("not bucketed" in record.cause or number for number, record in enumerate(made))
    assert re.search(why, made[0].cause)


def test_wrong_values_of_the_option():
    for value in ("yes", [], [0], [1.5]):
        with pytest.raises(Exception, match="option 'bucketing' is"):
            torch._dynamo.reset()
            torch.compile(lambda x: x + 1, backend="tpu", options={"bucketing": value})(torch.ones(2, device="tpu"))
