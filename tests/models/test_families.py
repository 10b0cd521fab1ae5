"""Ten Transformers families, unmodified: logits, generation and gradients equal the CPU's, with no CPU fallback."""

from __future__ import annotations

import copy

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


def test_static_decode_is_one_graph_that_updates_the_cache_in_place():
    """K and V of every layer are donated: the optimised program aliases them to its outputs."""
    from torch_tpu.compile import graph

    model = families.make("llama").to("tpu")
    start = families.prompt("llama")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made: list[graph.Segment] = []
    before = graph.Segment._build

    def build(self, *args):
        made.append(self)
        return before(self, *args)

    graph.Segment._build = build
    try:
        model.generate(**start, max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation="static")
    finally:
        graph.Segment._build = before
    assert not torch._dynamo.utils.counters["graph_break"]
    decode = made[-1]
    assert len(decode.mutated) == 3 * model.config.num_hidden_layers  # keys, values, length
    bound = next(iter(decode.cache.values()))
    assert bound.program.hlo().count("may-alias") + bound.program.hlo().count("must-alias") >= len(decode.mutated)
