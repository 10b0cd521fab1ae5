"""flex_attention against its definition: softmax of the changed and masked scores, written out on the CPU."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

B, H, L, D = 2, 4, 64, 16


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def _written_out(q, k, v, score_mod=None, mask_mod=None, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (scale or q.shape[-1] ** -0.5)
    places = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*places), -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v, scores.logsumexp(-1)


def _inputs(kv_heads=H, rows=L):
    return torch.randn(B, H, rows, D), torch.randn(B, kv_heads, L, D), torch.randn(B, kv_heads, L, D)


def _causal(b, h, i, j):
    return i >= j


def _window(b, h, i, j):
    return (i >= j) & (i - j < 9 + h)


def _bias(score, b, h, i, j):
    return score + (j - i) * 0.05 * (h + 1)


def _cap(score, b, h, i, j):
    return 3 * torch.tanh(score / 3)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("score_mod, mask_mod", [(None, None), (_bias, None), (None, _causal), (_cap, _window)])
def test_against_the_definition(score_mod, mask_mod, compiled):
    q, k, v = _inputs()
    mask = None if mask_mod is None else create_block_mask(mask_mod, None, H, L, L, device="tpu")
    run = torch.compile(flex_attention, backend="tpu", fullgraph=True) if compiled else flex_attention
    got = run(q.to("tpu"), k.to("tpu"), v.to("tpu"), score_mod=score_mod, block_mask=mask)
    torch.testing.assert_close(got.cpu(), _written_out(q, k, v, score_mod, mask_mod)[0], rtol=1e-4, atol=1e-4)


def test_grouped_queries_scale_and_logsumexp():
    q, k, v = _inputs(kv_heads=2, rows=24)
    run = torch.compile(flex_attention, backend="tpu", fullgraph=True)
    got, logsumexp = run(q.to("tpu"), k.to("tpu"), v.to("tpu"), score_mod=_bias, scale=0.3, enable_gqa=True,
                         return_lse=True)
    expected, wanted = _written_out(q, k, v, _bias, scale=0.3)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logsumexp.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_tensors_in_the_modification():
    """A table of biases and document numbers, as packed sequences need them."""
    q, k, v = _inputs()
    table, documents = torch.randn(H, 2 * L), torch.arange(L) // 20

    def run(q, k, v, table, documents, attend):
        def bias(score, b, h, i, j):
            return score + table[h, i - j + L]

        def same(b, h, i, j):
            return documents[i] == documents[j]

        return attend(q, k, v, bias, same)

    def ours(q, k, v, bias, same):
        return flex_attention(q, k, v, score_mod=bias,
                              block_mask=create_block_mask(same, None, None, L, L, device=q.device))

    got = torch.compile(run, backend="tpu")(*(x.to("tpu") for x in (q, k, v, table, documents)), ours)
    expected = run(q, k, v, table, documents, lambda *args: _written_out(*args)[0])
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_gradients():
    values = _inputs(kv_heads=2)
    ours, theirs = ([x.to(device).requires_grad_() for x in values] for device in ("tpu", "cpu"))
    mask = create_block_mask(_window, None, H, L, L, device="tpu")
    run = torch.compile(flex_attention, backend="tpu", fullgraph=True)
    grad = torch.randn(B, H, L, D)
    run(*ours, score_mod=_cap, block_mask=mask, enable_gqa=True).backward(grad.to("tpu"))
    _written_out(*theirs, _cap, _window)[0].backward(grad)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-3, atol=1e-4)


def test_queries_in_blocks(monkeypatch):
    from torch_tpu.compile import flex_attention as lowered

    monkeypatch.setattr(lowered, "_SCORES", B * H * L * 24)  # 24 rows at once, and a part
    values = _inputs()
    ours, theirs = ([x.to(device).requires_grad_() for x in values] for device in ("tpu", "cpu"))
    run = torch.compile(flex_attention, backend="tpu", fullgraph=True)
    mask = create_block_mask(_causal, None, None, L, L, device="tpu")
    got = run(*ours, score_mod=_bias, block_mask=mask)
    expected = _written_out(*theirs, _bias, _causal)[0]
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    got.sum().backward()
    expected.sum().backward()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-3, atol=1e-4)


def test_rows_without_any_key_are_zero():
    q, k, v = _inputs()
    mask = create_block_mask(lambda b, h, i, j: i > j, None, None, L, L, device="tpu")  # the first row sees nothing
    got = torch.compile(flex_attention, backend="tpu")(q.to("tpu"), k.to("tpu"), v.to("tpu"), block_mask=mask).cpu()
    assert not got.isnan().any() and not got[:, :, 0].any()


def test_the_cpu_keeps_its_own_check():
    q, k, v = (x.requires_grad_() for x in _inputs())
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(q, k, v)


def test_transformers_with_flex_attention():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=50)
    torch.manual_seed(0)
    cpu = LlamaForCausalLM(LlamaConfig(**config)).eval()
    tpu = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="flex_attention")).eval()
    tpu.load_state_dict(cpu.state_dict())
    tpu.to("tpu")
    ids = torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(tpu(ids.to("tpu")).logits.cpu(), cpu(ids).logits, rtol=1e-4, atol=1e-4)
