"""scaled_dot_product_attention: one operator, PyTorch's results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

r = torch.randn
attend = F.scaled_dot_product_attention
Q, K, V = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)
FEW_K, FEW_V = (2, 2, 7, 8), (2, 2, 7, 6)

CASES = {
    "plain": (attend, (Q, K, V)),
    "causal": (lambda q, k, v: attend(q, k, v, is_causal=True), (Q, K, V)),
    "scale": (lambda q, k, v: attend(q, k, v, scale=0.3), (Q, K, V)),
    "grouped": (lambda q, k, v: attend(q, k, v, enable_gqa=True), (Q, FEW_K, FEW_V)),
    "float mask": (attend, (Q, K, V, (2, 4, 5, 7))),
    "broadcast mask": (attend, (Q, K, V, (1, 7))),
    "mask by head": (attend, (Q, K, V, (4, 1, 1))),
    "grouped, mask": (lambda q, k, v, m: attend(q, k, v, m, enable_gqa=True), (Q, FEW_K, FEW_V, (2, 4, 5, 7))),
    "no batch": (attend, ((4, 5, 8), (4, 7, 8), (4, 7, 8))),
    "matrices": (attend, ((5, 8), (7, 8), (7, 8))),
    "five dimensions": (attend, ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8), (3, 1, 5, 7))),
    "broadcast batch": (attend, (Q, (4, 7, 8), (1, 1, 7, 6))),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, no_fallback):
    fn, shapes = CASES[name]
    args = [r(s) for s in shapes]
    compare(fn, *args, rtol=1e-4, atol=1e-5)
    compare_grad(lambda *a: fn(*a).pow(2), *args, rtol=1e-3, atol=1e-4)


def test_rows_without_keys_are_zero(no_fallback):
    mask = torch.rand(2, 1, 5, 7) > 0.3
    mask[0, 0, 0] = False
    compare(attend, r(Q), r(K), r(V), mask, rtol=1e-4, atol=1e-5)
    compare_grad(attend, r(Q), r(K), r(V), mask)


def test_bfloat16(no_fallback):
    compare(attend, *(r(s).bfloat16() for s in (Q, K, V)), rtol=3e-2, atol=3e-2)


def test_blocks_of_queries(monkeypatch, no_fallback):
    from torch_tpu.eager import execute
    from torch_tpu.lowering import attention

    monkeypatch.setattr(attention, "_SCORES", 300)
    execute.clear()
    mask = torch.rand(2, 1, 5, 7) > 0.3
    for extra in ((), (mask,)):
        compare_grad(lambda q, k, v, *m: attend(q, k, v, *m, is_causal=not m, enable_gqa=True),
                     r(Q), r(FEW_K), r(FEW_V),
                     *extra, rtol=1e-3, atol=1e-4)
    execute.clear()


def test_dropout_keeps_the_mean():
    q, k = r(Q), r(K)
    p = torch.softmax(q @ k.mT * 8**-0.5, -1)
    out = attend(q.to("tpu"), k.to("tpu"), torch.eye(7).expand(2, 4, 7, 7).to("tpu"), dropout_p=0.5).cpu()
    assert bool(((out == 0) | ((out - 2 * p).abs() < 1e-5)).all())
    assert 0.3 < float((out == 0).float().mean()) < 0.7


def test_gradient_of_the_gradient(no_fallback):
    def fn(q, k, v, m):
        out = attend(q, k, v, m)
        return torch.cat([g.flatten() for g in torch.autograd.grad(out.pow(2).sum(), (q, k, v, m), create_graph=True)])

    compare_grad(lambda *a: fn(*a).pow(2), r(Q).double(), r(K).double(), r(V).double(), r(5, 7).double())


def test_traces_as_one_node():
    from functorch.compile import aot_function, make_boxed_func

    seen = []

    def compiler(graph_module, _):
        seen.append([str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph_module.forward)

    args = [r(s, device="tpu", requires_grad=True) for s in (Q, FEW_K, FEW_V)]
    traced = aot_function(lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True), compiler, compiler)
    traced(*args).sum().backward()
    assert "tpu.sdpa.default" in seen[0] and "tpu.sdpa_backward.default" in seen[1]
    assert not any("bmm" in name or "softmax" in name for part in seen for name in part)


@pytest.mark.parametrize(("change", "message"), [
    (lambda q, k, v: attend(q, k, v.double()), "same dtype"),
    (lambda q, k, v: attend(q, k, v[0, 0, 0]), "at least 2 dimensional"),
    (lambda q, k, v: attend(q, k, v, torch.zeros(5, 7, dtype=torch.int32, device="tpu")), "attn_mask dtype"),
    (lambda q, k, v: attend(q, k, v, dropout_p=2.0), "dropout probability"),
    (lambda q, k, v: attend(q, k[:, :3], v, enable_gqa=True), "Number of heads"),
])
def test_errors(change, message):
    with pytest.raises(RuntimeError, match=message):
        change(*(r(s, device="tpu") for s in (Q, K, V)))
