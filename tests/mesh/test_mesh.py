"""torch.tpu.mesh on four virtual chips of one process, against one process on the CPU."""

import subprocess

import pytest

from processes import python

PRELUDE = """
    import copy, sys, warnings
    import torch
    from torch import nn
    torch.manual_seed(0)
    def close(a, b, what="", rtol=1e-4, atol=1e-5):
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=rtol, atol=atol,
                                   msg=lambda m: f"{what}: {m}")
    def raises(kind, part, call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except kind as error:
            assert part in str(error), str(error)
        else:
            raise AssertionError(f"{part!r} was not raised")
"""


def run(code: str, chips: int = 4, **environment: str) -> subprocess.CompletedProcess[str]:
    finished = python(PRELUDE + code, timeout=300, TORCH_TPU_VIRTUAL_CHIPS=str(chips), TORCH_TPU_FALLBACK="error",
                      OMP_WAIT_POLICY="PASSIVE", **environment)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished


def test_operators_over_divided_tensors():
    run("""
    mesh = torch.tpu.mesh(dp=2, tp=2)
    assert torch.tpu.mesh() is mesh and torch.tpu.mesh(dp=2, tp=2) is mesh and mesh.size == 4
    x, w, odd = torch.randn(8, 6, 12), torch.randn(20, 12), torch.randn(7, 3)
    X, W = mesh.place(x.to("tpu"), "dp"), mesh.place(w.to("tpu"), "tp", None)
    assert mesh.layout(X) == ("dp", None, None) and mesh.layout(W.t()) == (None, "tp")
    Y = nn.functional.linear(X, W)
    close(Y, nn.functional.linear(x, w)); assert mesh.layout(Y) == ("dp", None, "tp"), mesh.layout(Y)
    for f in (lambda t: t[1:], lambda t: t.reshape(16, 3, 12), lambda t: t.sort(0).values, lambda t: t.sum(0),
              lambda t: t.argmax(-1).float(), lambda t: torch.cat([t, t[:3]]), lambda t: t.cumsum(0), lambda t: t.std(),
              lambda t: t.flatten()[::3], lambda t: nn.functional.pad(t, (1, 2)), lambda t: t.softmax(0),
              lambda t: torch.linalg.svdvals(t), lambda t: t.index_select(0, torch.tensor([7, 0, 3], device=t.device))):
        close(f(X), f(x), atol=1e-4)
    # In place, through a view, and a value that changes its layout on the way.
    Z, z = X.clone(), x.clone()
    assert mesh.layout(Z) == ("dp", None, None)
    for t in (Z, z): t[2:5].mul_(3.0); t.add_(t.sum(0)); t[:, 0] = -1.0
    close(Z, z, "in place", atol=1e-4); assert mesh.layout(Z) == ("dp", None, None)
    close(torch.zeros_like(W), torch.zeros_like(w)); assert mesh.layout(torch.zeros_like(W)) == ("tp", None)
    # Integers that the host knows, scalars, random numbers, and tensors from before they were placed.
    i = torch.arange(12, device="tpu").view(4, 3)
    assert (i * 2 + 1).cpu().tolist() == (torch.arange(12).view(4, 3) * 2 + 1).tolist()
    assert (X.sum() * 0 + 2).item() == 2
    torch.manual_seed(1); a = torch.rand(64, device="tpu"); torch.manual_seed(1); b = torch.rand(64, device="tpu")
    assert torch.equal(a, b) and 0.2 < a.mean().item() < 0.8
    assert torch.equal(copy.deepcopy(Y).cpu(), Y.cpu()) and Y.tolist() == Y.cpu().tolist()
    raises(ValueError, "cannot be divided into 2", mesh.place, odd.to("tpu"), "tp")
    raises(ValueError, "no axis 'pp'", mesh.place, X, "pp")
    raises(ValueError, "one dimension only", mesh.place, X, "tp", "tp")
    raises(ValueError, "a layout of 4", mesh.place, X, None, None, None, "tp")
    raises(ValueError, "window on a larger storage", mesh.place, X[1:5], "dp")
    raises(TypeError, "on tpu", mesh.place, x, "dp")
    raises(RuntimeError, "has the mesh", torch.tpu.mesh, tp=4)
    """)


def test_memory_of_one_chip():
    run("""
    before = torch.tpu.memory_allocated()
    mesh = torch.tpu.mesh(tp=4)
    w = mesh.place(torch.randn(64, 256).to("tpu"), "tp"); assert torch.tpu.memory_allocated() - before == 64 * 256
    v = w * 2; assert torch.tpu.memory_allocated() - before == 2 * 64 * 256
    mesh.place(w); assert torch.tpu.memory_allocated() - before == 5 * 64 * 256
    del w, v; assert torch.tpu.memory_allocated() == before
    # What takes the place of the values keeps their layout.
    import io
    net = mesh.shard(nn.Linear(64, 256)); state = {k: v.cpu() for k, v in net.state_dict().items()}
    net.load_state_dict({k: v + 1 for k, v in state.items()})
    assert mesh.layout(net.weight) == ("tp", None); close(net.weight, state["weight"] + 1)
    with torch.no_grad(): net.weight.zero_(); net.weight.copy_(state["weight"].to("tpu"))
    assert mesh.layout(net.weight) == ("tp", None); close(net.weight, state["weight"])
    lstm = nn.LSTM(8, 16); want = copy.deepcopy(lstm)(torch.ones(3, 2, 8))[0]  # holds weak references to its weights
    close(mesh.shard(lstm)(torch.ones(3, 2, 8, device="tpu"))[0], want)
    assert mesh.layout(lstm.weight_ih_l0)[0] == "tp"
    file = io.BytesIO(); torch.save(net.state_dict(), file); file.seek(0)
    close(torch.load(file)["weight"], state["weight"])
    """)


def test_a_mesh_that_comes_late_and_wrong_sizes():
    run("""
    x = torch.randn(8, 8)
    a = x.to("tpu"); b = a @ a; m = nn.Linear(8, 8).to("tpu"); f = torch.compile(lambda t: m(t) + 1, backend="tpu")
    want = f(a).cpu()
    raises(ValueError, "this process has 4", torch.tpu.mesh, tp=8)
    raises(ValueError, "positive number", torch.tpu.mesh, tp=0)
    assert torch.tpu.mesh() is None
    mesh = torch.tpu.mesh(tp=4)
    close(a @ a, b); close(b + a, x @ x + x); close(f(a), want)
    a += 1; close(a, x + 1); mesh.shard(m); close(f(a - 1), want)
    """)


def test_many_programs_without_waiting():
    run("""
    mesh = torch.tpu.mesh(fsdp=2, tp=2)
    x = torch.randn(64, 64); a = mesh.place(x.to("tpu"), "fsdp", "tp")
    for _ in range(500):  # collectives that nothing orders: more than a chip's queue holds
        y = (a @ a).sum()
    close(y, (x @ x).sum(), atol=1e-2)
    """)


TRAINING = """
    from transformers import LlamaConfig, LlamaForCausalLM
    base = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    batches = torch.randint(0, 128, (20, 8, 16))
    def train(model, compiled, clip, device):
        opt = torch.optim.AdamW(model.parameters(), 1e-3)
        def step(x):
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            if clip: nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step(); opt.zero_grad()
            return loss
        run = torch.tpu.compile_step(step) if compiled else step
        return [run(x.to(device)).item() for x in batches], opt, run
    want, _, _ = train(copy.deepcopy(base), False, CLIP, "cpu")
    mesh = torch.tpu.mesh(AXES)
    model = copy.deepcopy(base); before = torch.tpu.memory_allocated()
    assert mesh.shard(model) is model and model.lm_head.weight is model.model.embed_tokens.weight
    held = torch.tpu.memory_allocated() - before
    got, opt, step = train(model, COMPILED, CLIP, "tpu")
    assert max(abs(a - b) for a, b in zip(want, got)) < 1e-4, (want, got)
    whole = sum(p.numel() * 4 for p in model.parameters())
    for p, state in opt.state.items():
        assert mesh.layout(state["exp_avg"]) == mesh.layout(p), (mesh.layout(state["exp_avg"]), mesh.layout(p))
"""


@pytest.mark.parametrize("axes, compiled, clip", [("fsdp=4", True, True), ("dp=2, tp=2", True, False),
                                                  ("fsdp=2, tp=2", False, True)])
def test_twenty_training_steps(axes, compiled, clip):
    code = TRAINING.replace("AXES", axes).replace("COMPILED", str(compiled)).replace("CLIP", str(clip))
    if axes == "fsdp=4":  # weights are gathered, gradients summed, and no activation is exchanged
        code += """
    assert held < 0.3 * whole, (held, whole)
    import re
    moved = set()
    for line in step.hlo().splitlines():
        if re.search(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\\(", line):
            moved |= {m for m in re.findall(r"f32\\[([\\d,]*)\\]", line.split("replica_groups")[0])}
    shapes = {",".join(map(str, s)) for p in model.parameters() for s in (p.shape, p.shape[::-1])} | {""}
    assert moved and moved <= shapes, moved - shapes
    """
    run(code)


def test_generation():
    run("""
    from transformers import AutoModelForCausalLM, Glm4Config, Glm4ForCausalLM, MixtralConfig, MixtralForCausalLM
    import os, tempfile
    text = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, eos_token_id=None, pad_token_id=0)
    ids = torch.randint(1, 96, (2, 7))
    models = []
    for kind, config in ((Glm4ForCausalLM, Glm4Config(**text)), (MixtralForCausalLM, MixtralConfig(**text))):
        model = kind(config).eval()
        for p in model.parameters():
            if p.ndim == 2: p.data.mul_(6.0)
        model.generation_config.eos_token_id = None
        models.append((model, model.generate(ids, max_new_tokens=12, do_sample=False)))
    mesh = torch.tpu.mesh(dp=2, tp=2)
    with tempfile.TemporaryDirectory() as folder:
        for model, want in models:
            model.save_pretrained(folder)
            loaded = AutoModelForCausalLM.from_pretrained(folder, device_map="tpu")
            loaded.generation_config.eos_token_id = None
            assert loaded.device.type == "tpu" and loaded.hf_device_map == {"": "tpu:0"}
            assert mesh.layout(loaded.model.layers[0].self_attn.q_proj.weight) == ("tp", None)
            for implementation in ("static", None):
                got = loaded.generate(ids.to("tpu"), max_new_tokens=12, do_sample=False,
                                      cache_implementation=implementation)
                assert got.tolist() == want.tolist(), (type(model).__name__, implementation)
            loaded.save_pretrained(os.path.join(folder, "again"))
            again = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "again"))
            for (name, p), q in zip(model.named_parameters(), again.parameters()): assert torch.equal(p, q), name
    """)


def test_layouts_without_weights():
    run("""
    from torch_tpu.mesh import layouts
    from transformers import AutoModelForCausalLM, Qwen3Config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=2, vocab_size=151935))
    found = {l.name: l for l in layouts(model, {"tp": 4, "fsdp": 2})}
    q = found["model.layers.0.self_attn.q_proj.weight"]
    assert q.spec == ("tp", "fsdp") and q.chip_bytes({"tp": 4, "fsdp": 2}) == q.nbytes // 8
    assert found["model.layers.1.mlp.down_proj.weight"].spec == ("fsdp", "tp")
    embedding = found["model.embed_tokens.weight"]
    assert embedding.spec[1] is not None and "no multiple" in embedding.why
    assert found["model.norm.weight"].spec == ()
    net = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 6))
    assert [l.spec for l in layouts(net, {"tp": 4})] == [("tp", None), (), (None, "tp"), ()]
    ruled = layouts(net, {"tp": 4}, rules={"*.weight": (None, None), "0.weight": (None, "tp")})
    assert [l.spec for l in ruled] == [(None, "tp"), (), (None, None), ()]
    raises(ValueError, "for 1.weight", layouts, net, {"tp": 4}, rules={"1.weight": ("tp", None)})
    raises(ValueError, "is called 'no.such'", layouts, net, {"tp": 4}, rules={"no.such": ("tp",)})
    raises(ValueError, "no axis 'ep'", layouts, net, {"tp": 4}, rules={"0.weight": ("ep", None)})
    """)


@pytest.mark.slow
def test_smollm2_on_four_chips():
    run("""
    import sys; sys.path.insert(0, "examples")
    import smollm2
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder, file = smollm2.weights()
    inputs = AutoTokenizer.from_pretrained(folder, gguf_file=file)("The French Bread Law states", return_tensors="pt")
    load = lambda **how: AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, **how)
    want = load().generate(**inputs, max_new_tokens=20, do_sample=False)
    mesh = torch.tpu.mesh(tp=4)
    model = load(device_map="tpu")
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert torch.tpu.memory_allocated() < 0.26 * whole and model.lm_head.weight is model.model.embed_tokens.weight
    got = model.generate(**inputs, max_new_tokens=20, do_sample=False, cache_implementation="static")
    assert got.tolist() == want.tolist()
    """)
