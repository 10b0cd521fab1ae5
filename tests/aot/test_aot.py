"""Programs compiled by libtpu for chips that are not here. Skipped only where libtpu cannot be installed."""

import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_tpu import aot
from torch_tpu.aot import models, topology
from torch_tpu.aot.compiling import compile_program
from torch_tpu.runtime import errors, memory
from torch_tpu.runtime import platform as tpu_platform

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "models"))
import families

pytestmark = pytest.mark.skipif(not (sys.platform == "linux" and platform.machine() == "x86_64"),
                                reason="libtpu is for Linux on x86-64")
SHAPE = models.Shape(batch=1, prompt=8, cache=32)


@pytest.fixture(autouse=True, scope="module")
def installed():
    if not tpu_platform.has_libtpu():
        pytest.fail("libtpu is not installed, and it could be: pip install -e '.[dev]'")


def test_the_report_adds_up():
    model = torch.nn.Linear(1000, 512, bias=False, device="meta", dtype=torch.bfloat16)
    made = aot.compile(model, torch.empty(64, 1000, dtype=torch.bfloat16), "v5e-1", tokens=64)
    report = made.report
    weights, inputs, results = 2 * 1000 * 512, 2 * 64 * 1000, 2 * 64 * 512
    assert report.fits and report.host_transfers == ()
    assert report.flops == pytest.approx(2 * 64 * 1000 * 512, rel=0.02)
    assert weights + inputs <= report.argument_bytes <= (weights + inputs) * 1.1
    assert report.hbm_traffic == pytest.approx(weights + inputs + results, rel=0.02)
    assert report.padding_bytes == 2 * 64 * 24  # 1,000 columns of the input are 1,024; the weight is stored transposed
    assert report.bound == "HBM" and report.step_s == pytest.approx(report.hbm_traffic / 819e9)
    assert report.tokens_s == pytest.approx(64 / report.step_s)
    assert report.largest[0].name == "weight" and report.largest[0].shape == (512, 1000)
    assert "fusion" in made.hlo and made.executable
    assert json.loads(report.to_json())["fits"] is True
    assert "fits            yes" in str(made) and "host transfers  none" in str(made)


def test_what_is_in_memory_has_the_names_of_modules():
    model = torch.nn.Sequential(torch.nn.Linear(256, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 256)).to("meta")
    given = torch.empty(16384, 256)
    report = aot.compile(model, (given, given), train=True, loss=torch.nn.functional.mse_loss).report
    largest = report.temporaries[0]
    assert largest.nbytes == 4 * 16384 * 8192 and largest.module in "012"
    assert {"0", "2"} <= set(report.traffic_of) and sum(report.traffic_of.values()) <= report.hbm_traffic
    assert report.parts.keys() == {"weights", "optimizer state", "inputs"}
    assert report.parts["optimizer state"] == pytest.approx(2 * report.parts["weights"], rel=0.01)
    assert f"f32[16384, 8192] 512.00 MiB {largest.module} (" in str(report)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_keys_and_values_of_different_sizes(kind):
    """Multi-head latent attention: a static cache of 48 numbers a key and 32 a value."""
    from transformers import DeepseekV3Config

    settings = DeepseekV3Config(
        vocab_size=500, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=2,
        num_experts_per_tok=2, topk_group=1, kv_lora_rank=24, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32)
    program = models.program(models.model(settings, torch.bfloat16), kind, SHAPE)
    widths = {each.name.rpartition(".")[2]: each.shape[-1] for each in program.arguments if ".layers.0." in each.name
              and each.name.endswith((".keys", ".values"))}
    assert set(widths) == {"keys", "values"} and widths["keys"] != widths["values"]
    _compile(program, ("v5e-1",))


def test_a_large_product_is_bound_by_compute():
    square = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    report = aot.compile(torch.matmul, (square, square), "v5e-1").report
    assert report.bound == "compute" and report.step_s == pytest.approx(2 * 4096**3 / 197e12, rel=0.01)


def test_what_does_not_fit_is_reported():
    model = torch.nn.Linear(100_000, 100_000, device="meta", dtype=torch.bfloat16)
    report = aot.compile(model, torch.empty(1, 100_000, dtype=torch.bfloat16, device="meta"), "v5e-1").report
    assert not report.fits and report.lacking == "HBM"
    assert re.fullmatch(r"it needs 18\.\d\d GiB of HBM, and 15\.75 GiB are there", report.problem)
    assert report.advice == ("4 chips (v5e-4, tp=4: about 4.66 GiB each)", "a chip with more HBM (v4, v5p, v6e, v7x)",
                             "weights of 8 bits (9.31 GiB less)")
    assert "NO" in str(report) and "to make it fit  4 chips" in str(report)
    assert report.largest[0].name == "weight" and report.peak_bytes is None


def test_nothing_is_allocated_and_nothing_changes():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = memory.BYTES.current
    with FakeTensorMode():
        fake = torch.empty(4, 16)
    aot.trace(model, fake)
    program = aot.trace(model, (fake, fake), train=True, loss=torch.nn.functional.mse_loss)
    assert memory.BYTES.current == held
    assert all(value.device.type == "cpu" and torch.equal(value, before[name])
               for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert {each.name for each in program.arguments if each.updated} >= {"0.weight", "1.running_mean",
                                                                         "optimizer state"}


def test_a_function_gets_copies_of_modules_and_optimizers():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    program = aot.trace(step, (model, optimizer, torch.empty(4, 8)))
    assert [each.updated for each in program.arguments].count(True) == 4  # weight, bias, their momenta
    assert not optimizer.state and model.weight.device.type == "cpu"


def test_random_numbers_are_drawn_by_the_program():
    state = torch.tpu.get_rng_state()
    program = aot.trace(torch.nn.Dropout(0.5), torch.empty(8))
    assert [each.name for each in program.arguments] == ["argument 0", "random keys"]
    assert torch.equal(torch.tpu.get_rng_state(), state)


def test_optimizers_of_a_closure_are_as_before():
    weight = torch.nn.Parameter(torch.ones(4, device="tpu"))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step(x):
        (weight * x).sum().backward()
        optimizer.step()

    aot.trace(step, torch.empty(4))
    assert not optimizer.state and weight.grad is None and weight.cpu().tolist() == [1] * 4
    step(torch.ones(4, device="tpu"))
    torch.testing.assert_close(weight.detach().cpu(), torch.full((4,), 0.9))


def test_settings_of_pytorch_are_in_the_program():
    given = torch.empty(64, 64)
    try:
        torch.set_float32_matmul_precision("medium")
        fast = aot.trace(torch.matmul, (given, given)).module
    finally:
        torch.set_float32_matmul_precision("highest")
    assert b"HIGHEST" in aot.trace(torch.matmul, (given, given)).module and b"HIGHEST" not in fast


def test_int64_stays():
    module = aot.trace(torch.add, (torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64))).module
    assert b"tensor<4xi64>" in module and b"xi32>" not in module


def test_rows_are_padded_for_the_matrix_unit_as_on_a_chip():
    module = aot.trace(torch.nn.Linear(64, 64, dtype=torch.bfloat16), torch.empty(1, 64, dtype=torch.bfloat16)).module
    assert b"tensor<8x64xbf16>" in module
    got = torch.compile(torch.nn.Linear(64, 64).to("tpu"), backend="tpu")(torch.ones(1, 64, device="tpu"))
    assert got.shape == (1, 64)


@pytest.mark.parametrize("function, message", [
    (lambda x: x[x > 0], r"test_aot\.py:\d+"),
    (lambda x: x * float(x.sum()), r"float\(tensor\) at .*test_aot\.py:\d+ needs a value"),
    (lambda x: torch.linalg.eig(x)[0], r"aten\.linalg_eig\.default at .*test_aot\.py:\d+ has no lowering for tpu")])
def test_an_unsupported_graph_says_where(function, message):
    with pytest.raises(errors.CaptureError, match=message):
        aot.compile(function, torch.empty(4, 4))


@pytest.mark.parametrize("name, message", [
    ("v5e-5", "slices of v5e have 1, 4, 8"), ("v9-1", "such as v4-1, v5e-1"), ("v5e-x", "is not known")])
def test_wrong_topologies(name, message):
    with pytest.raises(ValueError, match=message):
        aot.compile(torch.neg, torch.empty(2), name)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="go with a module"):
        aot.trace(torch.neg, torch.empty(2), train=True)
    with pytest.raises(TypeError, match="need train=True"):
        aot.trace(torch.nn.Linear(2, 2), torch.empty(2), optimizer=torch.optim.SGD)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tpu_platform, "has_libtpu", lambda: False)
    with pytest.raises(RuntimeError, match=r"pip install 'torch_tpu\[tpu\]'"):
        aot.compile(torch.neg, torch.empty(2))


def test_a_compiler_that_dies_is_an_error():
    program = aot.trace(torch.neg, torch.empty(2))
    broken = type(program)(program.name, b"this is no program", program.arguments, 0.0)
    with pytest.raises(RuntimeError, match=r"libtpu's compiler ended with status 1 on neg for v5e-1"):
        aot.compile_program(broken, "v5e-1")


def test_an_option_the_compiler_does_not_know():
    with pytest.raises(RuntimeError, match="xla_no_such_option"):
        aot.compile(torch.neg, torch.empty(2), xla={"xla_no_such_option": True})


@pytest.mark.parametrize("name", ["v4", "v5p", "v7x"])
def test_other_generations(name):
    report = aot.compile(torch.nn.Linear(256, 256, device="meta"), torch.empty(8, 256), f"{name}-1").report
    assert report.fits and report.fusions


@pytest.mark.slow
@pytest.mark.parametrize("name", topology.GENERATIONS)
def test_hbm_is_what_libtpu_says(name):
    given = torch.empty(400_000, 400_000, dtype=torch.bfloat16, device="meta")
    problem = aot.compile(torch.matmul, (given, given), f"{name}-1").report.problem
    assert f"{topology.GENERATIONS[name].hbm / 2**30:.2f} GiB are there" in problem


def test_two_at_once_do_not_collide():
    program = aot.trace(torch.nn.Linear(1024, 1024, device="meta"), torch.empty(64, 1024))
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda name: aot.compile_program(program, name), ["v5e-1", "v5e-1"]))
    assert made[0].report.flops == made[1].report.flops and made[0].hlo == made[1].hlo


def _compile(program, topologies=("v5e-1", "v6e-1")):
    with ThreadPoolExecutor(len(topologies)) as pool:
        made = list(pool.map(lambda name: aot.compile_program(program, name), topologies))
    for report in (each.report for each in made):
        assert report.fits and report.host_transfers == (), str(report)
        if program.name.endswith(("prefill", "decode")):
            in_place = sum(each.nbytes for each in program.arguments if each.updated)
            caches = [each for each in program.arguments if each.name.endswith(("keys", "values"))]
            assert caches and all(each.updated for each in caches)
            assert report.alias_bytes >= in_place


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("family", [
    family if family in ("llama", "qwen3") else pytest.param(family, marks=pytest.mark.slow)
    for family in families.DECODERS])
def test_families_serve(family, kind):
    _compile(models.program(families.make(family).bfloat16(), kind, SHAPE))


@pytest.mark.parametrize("family", [
    family if family in ("llama", "qwen3") else pytest.param(family, marks=pytest.mark.slow)
    for family in families.FAMILIES])
def test_families_train(family):
    _compile(aot.trace(families.make(family).train(), families.inputs(family), train=True, name=f"{family} train"))


TINY = ["--set", "num_hidden_layers=1", "--set", "hidden_size=64", "--set", "vocab_size=100", "--set",
        "num_attention_heads=2", "--set", "num_key_value_heads=1", "--set", "intermediate_size=64"]


def _check(*arguments):
    return subprocess.run([sys.executable, "-m", "torch_tpu", "check", *arguments], capture_output=True, text=True,
                          timeout=300)


def test_check():
    done = _check("Qwen3Config", *TINY, "--topology", "v6e-1", "--prompt", "16", "--cache", "64", "--price",
                  "v6e=1.5")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    (head, _, titles, *rows), costs = (part.splitlines() for part in re.split(r"\n(?=\nprogram +topology +fits +\$)",
                                                                              done.stdout))
    assert "the cheapest that fits: v6e-1, 1.50 $ an hour" in costs
    assert head.startswith("Qwen3ForCausalLM, bfloat16,") and titles.startswith("program   topology  fits")
    assert [row.split()[:3] for row in rows] == [["prefill", "v6e-1", "yes"], ["decode", "v6e-1", "yes"]]


def test_check_a_folder_as_json(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=1, hidden_size=64, vocab_size=100, num_attention_heads=2,
                intermediate_size=64).save_pretrained(tmp_path)
    done = _check(str(tmp_path), "--topology", "v5e-1", "--program", "decode", "--json", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    report, = json.loads(done.stdout)
    assert report["name"] == "LlamaForCausalLM decode" and report["tokens"] == 1 and report["fits"]


@pytest.mark.parametrize("arguments, message", [
    (["no/such/model"], "nothing is downloaded"),
    (["Qwen3Config", "--topology", "v5e-4", "--mesh", "tp=3"], "v5e-4 has 4"),
    (["Qwen3Config", "--topology", "v5e-4", "--tp", "3"], "a mesh {'tp': 3} has 3 devices, v5e-4 has 4"),
    (["Qwen3Config", "--topology", "v5e-4", "--tp", "4", "--mesh", "tp=4"], "give one of them"),
    (["Qwen3Config", "--program", "play"], "program 'play' is not known"),
    (["Qwen3Config", "--prompt", "4096"], "longer than the cache of 1024"),
    (["Qwen3Config", "--price", "v5e"], "as in --price v5e=1.2"),
    (["Qwen3Config", "--set", "layers"], "give FIELD=VALUE")])
def test_wrong_checks(arguments, message):
    done = _check(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_check_says_what_does_not_fit():
    done = _check("Qwen3Config", *TINY, "--set", "hidden_size=100000", "--topology", "v5e-1", "--program", "decode",
                  "--dtype", "float32", "--set", "vocab_size=100000")
    assert done.returncode == 1 and "NO" in done.stdout and "15.75 GiB are there" in done.stdout


def test_importing_the_package_is_light():
    code = ("import sys, torch_tpu.aot, torch_tpu.cli; assert 'jax' not in sys.modules; "
            "assert torch_tpu.aot.compile and 'jax' in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- several chips


def small():
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3", hidden_size=512, intermediate_size=1536, num_hidden_layers=2, head_dim=64,
                                  num_attention_heads=8, num_key_value_heads=4, vocab_size=32000)
    return models.model(config, torch.bfloat16)


def test_decode_over_four_chips():
    shape = models.Shape(batch=2, prompt=64, cache=256)
    whole = compile_program(models.program(small(), "decode", shape), "v5e-1").report
    report = compile_program(models.program(small(), "decode", shape, {"tp": 4}), "v5e-4").report
    assert report.mesh == {"tp": 4} and report.host_transfers == ()
    assert report.argument_bytes == pytest.approx(whole.argument_bytes / 4, rel=0.05)
    caches = [each for each in models.program(small(), "decode", shape, {"tp": 4}).arguments if ".keys" in each.name]
    assert caches and all("tp" in each.layout for each in caches)
    # What the attention and the MLP of each layer give is summed: [2, 1, 512] in bfloat16.
    sums = [each for each in report.collectives if each.kind == "all-reduce" and each.nbytes >= 2 * 512 * 2]
    assert sum(each.times for each in sums) >= 4 and {each.chips for each in report.collectives} == {4}
    assert report.exchanged_bytes == round(sum(each.sent() for each in report.collectives)) < 1 << 20
    assert "sent by each chip" in str(report) and json.loads(report.to_json())["mesh"] == {"tp": 4}


def test_a_training_step_over_eight_chips():
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)).to("meta")
    made = aot.compile(model, (torch.empty(64, 512), torch.empty(64, 512)), "v6e-8", mesh={"fsdp": 4, "tp": 2},
                       train=True, loss=torch.nn.functional.mse_loss)
    parameters = 2 * 512 * 2048 * 4
    assert made.report.argument_bytes == pytest.approx(3 * parameters / 8, rel=0.05)  # and AdamW's two moments
    assert any(each.kind in ("all-reduce", "reduce-scatter") for each in made.report.collectives)
    assert any(each.kind == "all-gather" for each in made.report.collectives)
    assert made.report.alias_bytes > 0 and made.executable


def test_attention_that_would_be_a_kernel_on_one_chip_is_divided():
    """XLA cannot divide a Pallas kernel."""
    given = tuple(torch.empty(4, 16, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    assert b"tpu_custom_call" in aot.trace(attention, given).module
    assert b"tpu_custom_call" not in aot.trace(attention, given, mesh={"dp": 4}).module


def test_meshes_that_do_not_fit():
    model = torch.nn.Linear(64, 64, device="meta")
    with pytest.raises(ValueError, match="has 3 devices, v5e-4 has 4"):
        aot.compile(model, torch.empty(8, 64), "v5e-4", mesh={"tp": 3})
    with pytest.raises(ValueError, match="has one chip"):
        aot.compile(model, torch.empty(8, 64), "v5e-1", mesh={"tp": 2})
    with pytest.raises(ValueError, match=r"1, 4, 8, 16"):
        aot.compile(model, torch.empty(8, 64), "v5e-3")
    with pytest.warns(RuntimeWarning, match="no multiple of fsdp=4"):
        aot.trace(model, torch.empty(6, 64), mesh={"fsdp": 4})
    assert topology.parse("v7x-4").devices == 8 and topology.parse("v5p-16").grid == "v5p:2x2x4"
