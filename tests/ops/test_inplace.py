"""Writes: in place, through out=, through copies; and the overlaps PyTorch refuses."""

from __future__ import annotations

import pytest
import torch

from conftest import compare

pytestmark = pytest.mark.usefixtures("no_fallback")

REFUSED = {
    "add to an expanded tensor": lambda d: torch.zeros(1, 3, device=d).expand(4, 3).add_(1),
    "copy to an expanded tensor": lambda d: torch.zeros(1, 3, device=d).expand(4, 3).copy_(torch.ones(4, 3)),
    "out= expanded": lambda d: torch.add(torch.ones(4, device=d), 1, out=torch.zeros(1, device=d).expand(4)),
    "scatter to an expanded tensor": lambda d: torch.zeros(1, 3, device=d).expand(4, 3).scatter_(
        0, torch.zeros(1, 3, dtype=torch.long, device=d), 2.0),
    "shifted copy": lambda d: (lambda x: x[1:].copy_(x[:-1]))(torch.arange(6.0, device=d)),
    "shifted add": lambda d: (lambda x: x[1:].add_(x[:-1]))(torch.arange(6.0, device=d)),
    "shifted out": lambda d: (lambda x: torch.add(x[:-1], 1, out=x[1:]))(torch.arange(6.0, device=d)),
    "transposed add": lambda d: (lambda x: x.add_(x.t()))(torch.ones(3, 3, device=d)),
    "cat into its part": lambda d: (lambda x: torch.cat([x[:3], x[3:6]], out=x[1:7]))(torch.arange(9.0, device=d)),
    "gather onto itself": lambda d: (lambda x: torch.gather(x, 0, torch.arange(9, device=d), out=x))(
        torch.arange(9.0, device=d)),
    "scatter of itself": lambda d: (lambda x: x.scatter_(0, torch.arange(9, device=d), x))(torch.arange(9.0, device=d)),
    "index_put of its part": lambda d: (lambda x: x.index_put_((torch.arange(3, device=d),), x[6:]))(
        torch.arange(9.0, device=d)),
}
ALLOWED = {
    "itself": lambda x: x.add_(x),
    "a full view": lambda x: x.mul_(x.view(4, 6)),
    "disjoint parts": lambda x: x[:2].add_(x[2:]),
    "interleaved": lambda x: x[:, ::2].lerp_(x[:, 1::2], 0.5),
    "a clone": lambda x: x[1:].copy_(x[:-1].clone()),
    "a flip": lambda x: x.copy_(x.flip(0)),
    "expanded fill": lambda x: x[:1].expand(3, 6).fill_(2),
    "expanded masked fill": lambda x: x[:1].expand(3, 6).masked_fill_(x[:1] > 2, 7.0),
    "windows": lambda x: x.view(-1).unfold(0, 4, 4).sub_(1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_overlaps_refused(what):
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match="unsupported operation"):
            REFUSED[what](device)


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded")
@pytest.mark.parametrize("what", ALLOWED)
def test_overlaps_allowed(what):
    compare(lambda x: (ALLOWED[what](x), x), torch.arange(24.0).view(4, 6))


def test_out_variants():
    def run(x):
        resized, wide = torch.empty(0, device=x.device), torch.empty(4, 3, device=x.device, dtype=torch.float64).t()
        torch.add(x.t(), 1, out=resized)
        torch.add(x, 1, out=wide)
        row = torch.zeros(3, 4, device=x.device)
        torch.add(x[0], 2, out=row[1])
        torch.cat([x[0, :2], x[1, :2]], out=row[2])
        torch.mm(x, x.t(), out=row[:, :3])
        return resized, wide, row

    got = compare(run, torch.arange(12.0).view(3, 4))
    assert got[0].stride() == (1, 4)


def test_errors_of_out_and_in_place():
    x = torch.ones(3, device="tpu")
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x, 1, out=torch.empty(3, device="tpu", dtype=torch.int64))
    with pytest.raises(RuntimeError, match="match"):
        x.add_(torch.ones(2, 3, device="tpu"))
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(3\) must match"):
        x.copy_(torch.zeros(4))
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(x, 1, out=torch.empty(2, device="tpu"))


def test_copies_between_devices_and_dtypes():
    whole = torch.arange(6)
    x = torch.zeros(6, device="tpu").copy_(whole)
    assert x.tolist() == whole.tolist()
    half = torch.zeros(6, dtype=torch.bfloat16).copy_(x)
    assert half.tolist() == whole.tolist()
    strided = torch.zeros(6, 2, device="tpu")[:, 1].copy_(whole)
    assert strided.tolist() == whole.tolist()
    turned = torch.zeros(3, 2).t().copy_(x.view(2, 3))
    assert turned.tolist() == [[0, 1, 2], [3, 4, 5]]
    compare(lambda x: (x.to(torch.uint8), x.to(torch.int16), x.to(torch.bool), x.to(torch.complex64)),
            torch.tensor([300.7, -1.5, 1e5, 0.0]))


def test_data_reassignment():
    x = torch.zeros(10, device="tpu")
    y = x.view(2, 5)
    x.data = x.data + 1
    assert y.sum() == 0 and x.sum() == 10
    x.data = x.data[:3]
    assert x.shape == (3,)
    a, b = torch.ones(3, device="tpu"), torch.zeros(4, device="tpu")
    view = a[1:]
    a.data, b.data = b.data, a.data
    view.add_(1)
    assert a.tolist() == [0] * 4 and b.tolist() == [1, 2, 2]


def test_resize_and_set():
    def run(x):
        x.resize_(2, 2)
        x.resize_(3, 2)
        part = torch.arange(24.0, device=x.device)[4:8]
        part.resize_(10).zero_()
        grown = torch.arange(6.0, device=x.device).resize_(9)[:6]
        window = torch.empty(0, device=x.device)
        window.set_(x.untyped_storage(), 1, (2, 2), (2, 1))
        window.add_(1)
        last = torch.arange(24.0, device=x.device).resize_(1, 2, 3, 4, memory_format=torch.channels_last)
        return x, part, grown, window, last, torch.ones(3, device=x.device).set_()

    compare(run, torch.arange(6.0))


def test_in_place_changes_of_shape():
    def run(x):
        x.squeeze_().unsqueeze_(0).transpose_(0, 2)
        x.add_(1)
        y = x[:, :, 0]
        y.t_()
        y.mul_(2)
        return x, y

    compare(run, torch.arange(6.0).view(2, 1, 3))


def test_empty_and_zero_dimensional():
    def run(x):
        empty = torch.zeros(2, 0, 3, device=x.device)
        empty[:, :, 1] = 4
        empty.mul_(2)
        x.add_(1)
        x.view(1, 1)[0, 0] = 7
        x[...] += 1
        return x, empty, empty.permute(2, 0, 1) + 1, empty.sum(1), x.expand(3), empty.reshape(-1)

    compare(run, torch.tensor(3.0))


def test_gradients_flow_through_written_views():
    def run(x):
        x = x.detach().requires_grad_()
        y = x * 1
        y[1] *= 3
        y.t()[0].mul_(2)
        y.view(-1)[5] = 0
        y[:, 1:3] = y[:, 1:3].detach() * 2 + x[:, :2]
        (y * y).sum().backward()
        return x.grad

    compare(run, torch.arange(12.0).view(3, 4))
    x = torch.ones(3, device="tpu", requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)
    y = x * 2
    z = y * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
