"""The short way of small eager operators gives what the long way gives, whatever changed between two calls."""

import threading

import pytest
import torch


def _twice(fn, *hosts):
    """The second of two calls, which takes the short way where there is one, against the CPU."""
    chips = [h.to("tpu") for h in hosts]
    fn(*[c.clone() for c in chips])
    torch.testing.assert_close(fn(*[c.clone() for c in chips]).cpu(), fn(*[h.clone() for h in hosts]))


A, B = torch.randn(4, 4), torch.randn(4, 4)


@pytest.mark.parametrize("fn", [
    lambda a, b: a + b, lambda a, b: a + a, lambda a, b: a * 2.5, lambda a, b: a - 3, lambda a, b: 3 - a,
    lambda a, b: a.add_(b), lambda a, b: a.mul_(a), lambda a, b: a.mul_(0.5), lambda a, b: a.neg_(),
    lambda a, b: a < b, lambda a, b: a < 0.0, lambda a, b: a @ b, lambda a, b: torch.relu(a), lambda a, b: a.t() + b,
    lambda a, b: a + a.t(), lambda a, b: a[1:] + b[:3], lambda a, b: a.view(2, 8) + b.view(2, 8), lambda a, b: a + b[0],
    lambda a, b: a + torch.tensor(2.0), lambda a, b: torch.add(a, b, alpha=2), lambda a, b: a.clone() + b,
    lambda a, b: a.view(torch.int32) + b.view(torch.int32), lambda a, b: a + b.half(), lambda a, b: a * True,
    lambda a, b: a.unsqueeze(0).add_(b), lambda a, b: a.expand(4, 4) * b, lambda a, b: torch.nn.functional.gelu(a),
])
def test_second_call(fn):
    _twice(fn, A, B)


def test_numbers_that_are_equal_but_not_the_same():
    x = torch.ones(3, device="tpu")
    for number in (1, 1.0, 0, 0.0, -0.0, True, 2**40, 0.1, float("nan")):
        for _ in range(2):
            got, want = (x * number).cpu(), torch.ones(3) * number
            assert torch.equal(got.view(torch.int32), want.view(torch.int32)), number


def test_storage_that_was_shared_in_between():
    a = torch.ones(5, device="tpu")
    for _ in range(3):
        kept = a.clone()
        twin = torch.empty_like(a)
        twin.untyped_storage().copy_(a.untyped_storage())  # shares the array until one is written
        before = twin.tolist()
        a.add_(1.0)
        assert twin.tolist() == before == kept.tolist() and a.tolist() == [v + 1 for v in before]


def test_data_assigned_in_between():
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    x, y = a.to("tpu"), b.to("tpu")
    x + y, x + y
    x.data = x.data.t()
    torch.testing.assert_close((x + y).cpu(), a.t() + b)
    x.data = x.data[:1]
    torch.testing.assert_close((x + y).cpu(), a.t()[:1] + b)


def test_precision_and_default_dtype_changed_in_between():
    x = torch.randn(64, 64)
    chip = x.to("tpu")
    strict = (chip @ chip).cpu(), (chip @ chip).cpu()
    torch.set_float32_matmul_precision("medium")
    try:
        assert (chip @ chip).dtype == torch.float32
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal((chip @ chip).cpu(), strict[1])
    whole = torch.arange(4, device="tpu")
    assert (whole / 2).dtype == torch.float32 == (whole / 2).dtype
    torch.set_default_dtype(torch.float64)
    try:
        assert (whole / 2).dtype == torch.float64 == (whole * 0.5).dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_flow():
    x = torch.randn(3, 3, device="tpu", requires_grad=True)
    for _ in range(2):
        (grad,) = torch.autograd.grad((x * x).sum(), x)
        torch.testing.assert_close(grad, 2 * x.detach())


def test_threads_share_no_address_and_lose_no_count():
    device = torch.ones(7, device="tpu")
    before = torch.tpu.memory_allocated()
    kept: list[torch.Tensor] = []

    def work():
        kept.extend([device + float(i % 3) for i in range(300)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({t.untyped_storage().data_ptr() for t in kept}) == len(kept) == 1200
    assert all(t[0].item() in (1.0, 2.0, 3.0) for t in kept[::50])
    assert torch.tpu.memory_allocated() - before == 1200 * 28
    kept.clear()
    assert torch.tpu.memory_allocated() == before
