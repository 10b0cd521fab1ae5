"""torch.cond, while_loop, scan and map: one program, chosen and repeated on the device; results of the CPU."""

import warnings

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.utils import _pytree as pytree


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def _same(function, *args, programs=1, primitive=""):
    """The compiled function against the CPU's own, in so many programs."""
    expected = function(*args)
    moved = pytree.tree_map_only(torch.Tensor, lambda t: t.to("tpu"), args)
    before = len(torch.tpu.compiler.stats().graphs)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is cut into.*")
        got = torch.compile(function, backend="tpu", fullgraph=True)(*moved)
    for mine, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        assert mine.device.type == "tpu" and mine.dtype == theirs.dtype
        torch.testing.assert_close(mine.cpu(), theirs)
    assert len(torch.tpu.compiler.stats().graphs) - before == programs
    return got


def _branch(x, y):
    return torch.cond(x.sum() > 0, lambda a, b: (a.sin() + b, b.long()), lambda a, b: (a.cos() - b, b.long() * 2),
                      (x, y))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond(sign):
    _same(_branch, torch.full((3, 4), sign), torch.arange(4.0))


def test_both_branches_are_in_one_program(tmp_path):
    torch.tpu.compiler.dump(tmp_path)
    try:
        compiled = torch.compile(_branch, backend="tpu", fullgraph=True)
        for sign in (1.0, -1.0, 1.0):
            x, y = torch.full((3, 4), sign), torch.arange(4.0)
            for mine, theirs in zip(compiled(x.to("tpu"), y.to("tpu")), _branch(x, y)):
                torch.testing.assert_close(mine.cpu(), theirs)
    finally:
        torch.tpu.compiler.dump(None)
    texts = [path.read_text() for path in tmp_path.glob("*.stablehlo.mlir")]
    assert len(texts) == 1 and "stablehlo.case" in texts[0]


def test_cond_inside_cond_with_weights_around():
    weight = torch.arange(6.0)

    def f(x, weight):
        def positive(x):
            return torch.cond(x.max() > 3, lambda x: x * weight, lambda x: x + weight, (x,))
        return torch.cond(x.sum() > 0, positive, lambda x: x - weight, (x,))

    for value in (5.0, 1.0, -1.0):
        torch._dynamo.reset()
        _same(f, torch.full((6,), value), weight)


def test_gradients_through_cond():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x * x, lambda x: x * 3, (x,)).sum()

    for value in (2.0, -2.0):
        ours, theirs = (torch.full((3,), value).to(device).requires_grad_() for device in ("tpu", "cpu"))
        torch.compile(f, backend="tpu", fullgraph=True)(ours).backward()
        f(theirs).backward()
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_while_loop_over_integers_and_floats():
    def f(n, x):
        return while_loop(lambda i, x, done: (i < n) & ~done, lambda i, x, done: (i + 1, x * 1.5, (x > 20).any()),
                          (torch.zeros((), dtype=torch.int64, device=x.device), x,
                           torch.zeros((), dtype=torch.bool, device=x.device)))

    _same(f, torch.tensor(50), torch.arange(1.0, 4.0))
    torch._dynamo.reset()
    _same(f, torch.tensor(0), torch.arange(1.0, 4.0))


def test_scan_of_a_recurrence():
    def f(xs, weight):
        def step(carry, x):
            carry = torch.tanh(carry @ weight + x)
            return carry, carry.sum(-1)
        return scan(step, torch.zeros(2, 3, device=xs.device), xs)

    torch.manual_seed(0)
    _same(f, torch.randn(5, 2, 3), torch.randn(3, 3))


def test_gradients_through_scan():
    def f(xs, weight):
        def step(carry, x):
            carry = torch.tanh(carry * weight + x)
            return carry, carry.clone()
        carry, rows = scan(step, torch.zeros(3, device=xs.device), xs)
        return carry.sum() + (rows * rows).sum()

    torch.manual_seed(0)
    values = torch.randn(4, 3), torch.randn(3)
    ours, theirs = ([v.to(device).requires_grad_() for v in values] for device in ("tpu", "cpu"))
    torch.compile(f, backend="tpu", fullgraph=True)(*ours).backward()
    f(*theirs).backward()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad.cpu(), other.grad)


def test_associative_scan_and_map():
    torch.manual_seed(0)
    _same(lambda x: associative_scan(lambda a, b: a * 0.5 + b, x, 0, combine_mode="generic"), torch.randn(7, 3))
    torch._dynamo.reset()
    _same(lambda x, y: map_rows(lambda row, y: (row @ y).relu(), x, y), torch.randn(4, 2, 3), torch.randn(3, 5))


def test_eagerly():
    x = torch.arange(1.0, 4.0)
    got = torch.cond(x.to("tpu").sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x.to("tpu"),))
    torch.testing.assert_close(got.cpu(), x.sin())


def test_random_numbers_in_a_branch_run_between_two_programs():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x * 1, (x,)) * 2

    with pytest.warns(RuntimeWarning, match="cond"):
        got = torch.compile(f, backend="tpu")(torch.ones(8, device="tpu")).cpu()
    assert bool(((got >= 2) & (got < 4)).all()) and got.unique().numel() > 1
