"""Ten Transformers families, unmodified: logits, generation and gradients equal the CPU's, with no CPU fallback."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import families

pytestmark = pytest.mark.usefixtures("no_fallback")


def moved(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to("tpu") for name, value in batch.items()}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_logits_and_gradients(family):
    model = families.make(family)
    batch = families.inputs(family)
    want = model(**batch)
    want.loss.backward()
    device_model = copy.deepcopy(model).to("tpu")
    device_model.zero_grad()
    got = device_model(**moved(batch))
    assert got.logits.device.type == "tpu"
    torch.testing.assert_close(got.logits.cpu(), want.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.loss.cpu(), want.loss, rtol=1e-4, atol=1e-4)
    got.loss.backward()
    for (name, parameter), reference in zip(device_model.named_parameters(), model.parameters()):
        if reference.grad is None:
            assert parameter.grad is None, name
            continue
        scale = reference.grad.abs().max().item()
        torch.testing.assert_close(parameter.grad.cpu(), reference.grad, rtol=1e-3, atol=1e-4 * max(scale, 1.0),
                                   msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("family", families.FAMILIES)
def test_bfloat16_logits(family):
    """bfloat16 keeps 8 bits; the distance to float32 may be no larger than twice the CPU's own."""
    model = families.make(family)
    batch = families.prompt(family) if family != "whisper" and family != "t5" else families.inputs(family)
    with torch.no_grad():
        exact = model(**batch).logits
        half = model.to(torch.bfloat16)
        narrow = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
        cpu = half(**narrow).logits.float()
        got = half.to("tpu")(**moved(narrow)).logits.cpu().float()
    theirs = (cpu - exact).abs().mean().item()
    ours = (got - exact).abs().mean().item()
    assert ours <= 2 * theirs + 1e-3, (ours, theirs)


@pytest.mark.parametrize("family", families.GENERATORS)
def test_generate(family):
    model = families.make(family)
    start = families.prompt(family)
    settings = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    want = model.generate(**start, **settings)
    want_beam = model.generate(**start, **settings, num_beams=3)
    model.to("tpu")
    greedy = model.generate(**moved(start), **settings)
    assert greedy.device.type == "tpu"
    assert torch.equal(greedy.cpu(), want)
    assert torch.equal(model.generate(**moved(start), **settings, num_beams=3).cpu(), want_beam)


@pytest.mark.parametrize("family", families.GENERATORS)
def test_static_cache_is_compiled_and_equal(family):
    model = families.make(family)
    start = families.prompt(family)
    settings = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    want = model.generate(**start, **settings)
    model.to("tpu")
    torch._dynamo.reset()
    before = torch.tpu.compiler.stats()
    if family not in families.DECODERS:  # an encoder wants its input on its own device, as on CUDA
        start = moved(start)
    got = model.generate(**start, **settings, cache_implementation="static")
    after = torch.tpu.compiler.stats()
    assert got.device.type == ("cpu" if family in families.DECODERS else "tpu")
    assert torch.equal(got.cpu(), want)
    assert len(after.graphs) > len(before.graphs), "the decode step was not compiled"
    again = model.generate(**start, **settings, cache_implementation="static")
    assert torch.equal(again.cpu(), want)
    assert torch.tpu.compiler.stats().compiled == after.compiled, "a second generate of the same shapes compiled"


@pytest.mark.parametrize("family", ("llama", "gemma3"))
def test_sampling_follows_the_seed(family):
    model = families.make(family).to("tpu")
    start = moved(families.prompt(family))
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(model.generate(**start, max_new_tokens=12, min_new_tokens=12, do_sample=True, temperature=3.0,
                                   top_k=40).cpu())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def _static_programs(folder, model, start):
    """What a `generate` with a static cache compiles: the optimised HLO of each program, by name."""
    torch.tpu.compiler.dump(folder)
    try:
        model.generate(**start, max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation="static")
    finally:
        torch.tpu.compiler.dump(None)
    return {path.name[4:-len(".hlo.txt")]: path.read_text() for path in sorted(folder.glob("*.hlo.txt"))}


@pytest.mark.parametrize("traced", [False, True], ids=["captured", "dynamo"])
def test_static_decode_is_one_program_that_updates_the_cache_in_place(tmp_path, traced):
    """Keys, values and length of every layer are donated: the optimised program aliases them to its outputs, and copies
    no cache, nor repeats its heads for the queries that share them."""
    from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=100, max_position_embeddings=2048)
    model = LlamaForCausalLM(config).eval().to("tpu")
    start = {"input_ids": torch.tensor([[5, 6, 7]], device="tpu")}
    if traced:
        model.generation_config.compile_config = CompileConfig(backend="tpu", dynamic=False, mode="default",
                                                               fullgraph=True)
    programs = _static_programs(tmp_path, model, start)
    decode = [text for name, text in programs.items() if name != "LlamaForCausalLM.prefill"]
    assert len(decode) == 1 and ("LlamaForCausalLM.decode" in programs) is not traced
    assert decode[0].count("may-alias") + decode[0].count("must-alias") >= 3 * config.num_hidden_layers
    entry = decode[0][decode[0].index("ENTRY"):]
    assert "f32[2,1024,16]" in entry
    assert not re.search(r"= f32\[(1,)?2,1024,16\]\S* copy\(", entry)
    assert not re.search(r"f32\[(1,)?(4|2,2),1024,16\]", decode[0])

