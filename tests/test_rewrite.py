"""What a graph says in several operators and the device does better in one: same results in the cheaper form."""

import pytest
import torch

CPU_SDPA = torch.nn.functional.scaled_dot_product_attention


def _compiled(form, function):
    if form == "dynamo":
        return torch.compile(function, backend="tpu", fullgraph=True)
    return torch.tpu.compile_step(function)


@pytest.fixture(params=["dynamo", "captured"])
def form(request):
    torch._dynamo.reset()
    return request.param


def _repeat(x, n):
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, n, length, width).reshape(batch, heads * n, length, width)


def _stablehlo(folder):
    return "\n".join(path.read_text() for path in folder.glob("*.stablehlo.mlir"))


@pytest.mark.parametrize("batch", [1, 3])
def test_attention_over_repeated_heads_repeats_nothing(form, batch, tmp_path):
    torch.manual_seed(0)
    q, k, v = torch.randn(batch, 6, 5, 8), torch.randn(batch, 2, 7, 8), torch.randn(batch, 2, 7, 8)
    mask = torch.rand(batch, 1, 5, 7) > 0.2

    def attend(q, k, v, mask):
        return CPU_SDPA(q, _repeat(k, 3), _repeat(v, 3), attn_mask=mask)

    torch.tpu.compiler.dump(tmp_path)
    try:
        with torch.no_grad():
            got = _compiled(form, attend)(q.to("tpu"), k.to("tpu"), v.to("tpu"), mask.to("tpu"))
    finally:
        torch.tpu.compiler.dump(None)
    torch.testing.assert_close(got.cpu(), attend(q, k, v, mask), rtol=1e-5, atol=1e-5)
    assert f"{batch}x2x3x7x8" not in _stablehlo(tmp_path)


def test_other_repetitions_are_left_alone(form):
    """Heads in another order (repeat instead of repeat_interleave), or repeated keys with other values."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)

    def around(q, k, v):
        return CPU_SDPA(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), CPU_SDPA(q, _repeat(k, 2), v.repeat(1, 2, 1, 1))

    with torch.no_grad():
        got = _compiled(form, around)(q.to("tpu"), k.to("tpu"), v.to("tpu"))
    for mine, theirs in zip(got, around(q, k, v)):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("dim, count", [(0, 1), (1, 3), (2, 4), (-1, 2)])
def test_rows_that_follow_each_other_are_written_without_a_scatter(form, dtype, dim, count, tmp_path):
    shape = [1, 5, 6, 7]
    rows = list(shape)
    rows[dim] = min(count, shape[dim])
    base = torch.arange(210).reshape(shape).to(dtype)
    source = -torch.arange(1, 1 + torch.Size(rows).numel()).reshape(rows).to(dtype)

    def write(base, source, start):
        at = torch.arange(source.shape[dim], device=source.device) + start
        base.index_copy_(dim, at, source)
        return base * 2

    torch.tpu.compiler.dump(tmp_path)
    try:
        step = _compiled(form, write)
        for start in (0, shape[dim] - rows[dim]):
            theirs, mine = base.clone(), base.to("tpu")
            with torch.no_grad():
                expected = write(theirs, source, torch.tensor(start))
                got = step(mine, source.to("tpu"), torch.tensor(start, device="tpu"))
            assert torch.equal(got.cpu(), expected) and torch.equal(mine.cpu(), theirs)
    finally:
        torch.tpu.compiler.dump(None)
    assert "scatter" not in _stablehlo(tmp_path)


def test_rows_in_any_order_are_scattered(form):
    base, source, at = torch.zeros(6, 3), torch.ones(2, 3), torch.tensor([4, 1])

    def write(base, source, at):
        return base.index_copy(0, at, source)

    with torch.no_grad():
        got = _compiled(form, write)(base.to("tpu"), source.to("tpu"), at.to("tpu"))
    assert torch.equal(got.cpu(), write(base, source, at))


def test_a_write_outside_the_cache_is_seen(form):
    """Eager mode raises; a program cannot, and must not change other rows in silence."""
    def write(base, source, start):
        return base.index_copy(0, torch.arange(2, device=base.device) + start, source)

    with torch.no_grad():
        got = _compiled(form, write)(torch.zeros(4, 3, device="tpu"), torch.ones(2, 3, device="tpu"),
                                     torch.tensor(3, device="tpu"))
    assert got.isnan().any()


def test_gradients_flow_through_repeated_heads():
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8))

    def loss(q, k, v):
        return CPU_SDPA(q, _repeat(k, 2), _repeat(v, 2)).pow(2).sum()

    ours = [x.to("tpu").requires_grad_() for x in (q, k, v)]
    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    _compiled("dynamo", loss)(*ours).backward()
    loss(*theirs).backward()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)
