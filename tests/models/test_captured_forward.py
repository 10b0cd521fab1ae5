"""generate with a static cache is captured without Dynamo: what changes between calls is noticed, and what a capture
cannot do goes through torch.compile."""

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def _model(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=2048), **changes})).eval()


def _pair(**changes):
    model = _model(**changes)
    return model, _model(**changes).to("tpu")


def _tokens(model, ids=IDS, **settings):
    static = {"cache_implementation": "static"} if model.device.type == "tpu" else {}
    return model.generate(ids.to(model.device), **{**dict(max_new_tokens=6, min_new_tokens=6, do_sample=False,
                                                          pad_token_id=0), **static, **settings}).cpu()


def _graphs():
    return [record.name for record in torch.tpu.compiler.stats().graphs]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.tpu.compiler.reset()


def _traced_by_dynamo():
    return torch._dynamo.utils.counters["stats"]["calls_captured"]


def test_prefill_and_decode_are_two_programs_that_later_calls_share():
    cpu, tpu = _pair()
    for _ in range(3):
        assert torch.equal(_tokens(tpu), _tokens(cpu))
    assert _graphs() == ["LlamaForCausalLM.prefill", "LlamaForCausalLM.decode"]
    assert not _traced_by_dynamo()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # counted all the same, where people look


@pytest.mark.parametrize("settings", [
    {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, {"output_scores": True, "output_logits": True},
    {"repetition_penalty": 1.3}, {"output_attentions": True, "output_hidden_states": True}],
    ids=["beams", "sequences", "scores", "penalty", "attentions"])
def test_every_way_to_generate(settings):
    cpu, tpu = _pair(attn_implementation="eager" if "output_attentions" in settings else "sdpa")
    given = {**settings, **({"return_dict_in_generate": True} if "output_scores" in settings or
                            "output_attentions" in settings else {})}
    if "return_dict_in_generate" not in given:
        assert torch.equal(_tokens(tpu, **given), _tokens(cpu, **given))
        return
    run = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, **given)
    mine = tpu.generate(IDS.to("tpu"), cache_implementation="static", **run)
    theirs = cpu.generate(IDS, cache_implementation="static", **run)
    assert torch.equal(mine.sequences.cpu(), theirs.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(mine, name, None) or (), getattr(theirs, name, None) or ()):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)
    for name in ("attentions", "hidden_states"):
        for a, b in zip(getattr(mine, name, None) or (), getattr(theirs, name, None) or ()):
            for x, y in zip(a, b):
                same = [slice(0, min(n, m)) for n, m in zip(x.shape, y.shape)]  # the cache here is longer
                torch.testing.assert_close(x.cpu()[tuple(same)], y[tuple(same)], rtol=1e-4, atol=1e-4)


def test_a_batch_with_padding():
    cpu, tpu = _pair()
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = (torch.arange(5) >= torch.tensor([[2], [0]])).long()
    mine = tpu.generate(ids.to("tpu"), attention_mask=mask.to("tpu"), cache_implementation="static", max_new_tokens=6,
                        min_new_tokens=6, do_sample=False, pad_token_id=0).cpu()
    theirs = cpu.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(mine, theirs)


def _scale(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def _replace(model):
    torch.manual_seed(5)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32).to(model.device), requires_grad=False)


def _shift(module, args, output):
    return output + 1


def _patch_class(model):
    old = type(model.model.layers[0].mlp).forward
    model.model.layers[0].mlp.__class__ = type("Other", (type(model.model.layers[0].mlp),), {
        "forward": lambda self, x: 2 * old(self, x)})


def _patch_instance(model):
    old = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: 3 * old(x)


@pytest.mark.parametrize("change", [
    _scale, _replace, _patch_class, _patch_instance,
    lambda model: model.model.layers[1].mlp.register_forward_hook(_shift),
    lambda model: model.set_attn_implementation("eager"),
    lambda model: model.resize_token_embeddings(70),
    lambda model: model.model.layers.__delitem__(1),
    lambda model: model.to(torch.float64),
], ids=["in place", "parameter", "class", "instance", "hook", "attention", "vocabulary", "layer", "dtype"])
def test_what_changes_between_two_calls_is_noticed(change):
    cpu, tpu = _pair()
    assert torch.equal(_tokens(tpu), _tokens(cpu))
    for model in (cpu, tpu):
        change(model)
    if change.__name__ == "<lambda>" and len(cpu.model.layers) == 1:
        for model in (cpu, tpu):
            model.config.num_hidden_layers = 1
    assert torch.equal(_tokens(tpu), _tokens(cpu))


def test_hooks_of_the_user_run_at_every_token():
    cpu, tpu = _pair()
    counts = {}
    for model in (cpu, tpu):
        seen = counts[model.device.type] = []
        model.lm_head.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        _tokens(model)
    assert len(counts["tpu"]) == len(counts["cpu"]) == 6


def test_code_that_cannot_be_captured_goes_through_torch_compile_and_says_so():
    cpu, tpu = _pair()
    for model in (cpu, tpu):
        layer = model.model.layers[0].mlp
        old = layer.forward

        def looks(x, old=old):
            return old(x) * (2.0 if float(x.detach().abs().sum()) > 0 else 1.0)

        layer.forward = looks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = _tokens(tpu)
        _tokens(tpu)
    assert torch.equal(got, _tokens(cpu))
    said = [str(w.message) for w in caught if "goes through torch.compile" in str(w.message)]
    assert len(said) == 2 and "LlamaForCausalLM" in said[0]  # prefill and decode, once each


def test_settings_of_dynamo_are_followed():
    from transformers import CompileConfig

    cpu, tpu = _pair()
    got = _tokens(tpu, compile_config=CompileConfig(backend="tpu", fullgraph=True, dynamic=False, mode="default"))
    assert torch.equal(got, _tokens(cpu))
    assert torch._dynamo.utils.counters["stats"]["calls_captured"]


def test_training_between_two_calls():
    cpu, tpu = _pair()
    for model in (cpu, tpu):
        _tokens(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train()
        model(IDS.to(model.device), labels=IDS.to(model.device)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
    assert torch.equal(_tokens(tpu), _tokens(cpu))


def test_the_cache_is_gone_after_generate():
    import gc

    gc.collect()
    others = torch.tpu.memory_allocated()
    tpu = _model().to("tpu")
    _tokens(tpu)
    gc.collect()
    before = torch.tpu.memory_allocated()
    for _ in range(2):
        _tokens(tpu)
        gc.collect()
        assert torch.tpu.memory_allocated() <= before
    weights = sum(p.numel() * p.element_size() for p in tpu.parameters())
    assert before - others < weights + 2 * 2 * 2 * 1024 * 8 * 4  # less than the weights and one cache


def test_threads_generate_with_one_model():
    from concurrent.futures import ThreadPoolExecutor

    cpu, tpu = _pair()
    prompts = [torch.tensor([[n, n + 1, n + 2]]) for n in range(6)]
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda ids: _tokens(tpu, ids), prompts))
    for mine, ids in zip(got, prompts):
        assert torch.equal(mine, _tokens(cpu, ids))


def test_inference_mode():
    cpu, tpu = _pair()
    with torch.inference_mode():
        assert torch.equal(_tokens(tpu), _tokens(cpu))
    assert torch.equal(_tokens(tpu), _tokens(cpu))
    assert _graphs() == ["LlamaForCausalLM.prefill", "LlamaForCausalLM.decode"]


def test_autocast():
    """Keys and values may be of other dtypes than the model."""
    logits = []
    for model in _pair():
        with torch.autocast(model.device.type, torch.bfloat16):
            made = model.generate(IDS.to(model.device), cache_implementation="static", max_new_tokens=3,
                                  do_sample=False, return_dict_in_generate=True, output_logits=True)
        logits.append([each.float().cpu() for each in made.logits])
    for theirs, mine in zip(*logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1)


def test_copies_and_saved_models_have_programs_of_their_own(tmp_path):
    import copy

    cpu, tpu = _pair()
    expected = _tokens(cpu)
    assert torch.equal(_tokens(tpu), expected)
    other = copy.deepcopy(tpu)
    torch.save(tpu, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    with torch.no_grad():
        tpu.lm_head.weight.zero_()
    for model in (other, loaded):
        assert torch.equal(_tokens(model), expected)
    assert not torch.equal(_tokens(tpu), expected)


def test_the_setting_and_the_stance_lead_through_torch_compile(monkeypatch):
    cpu, tpu = _pair()
    expected = _tokens(cpu)
    monkeypatch.setenv("TORCH_TPU_CAPTURE", "off")
    assert torch.equal(_tokens(tpu), expected)
    assert _traced_by_dynamo() and "LlamaForCausalLM.decode" not in _graphs()
    monkeypatch.delenv("TORCH_TPU_CAPTURE")
    before = _graphs()
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(_tokens(tpu), expected)
    assert _graphs() == before
    assert torch.equal(_tokens(tpu), expected)
    assert "LlamaForCausalLM.decode" in _graphs()
