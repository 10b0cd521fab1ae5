"""Transformers' tensor parallelism and Accelerate on two ranks, with tiny models, against one process on the CPU."""

import pytest
from launcher import run

TENSOR_PARALLEL = """
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig
warnings.simplefilter("ignore")
base = dict(vocab_size=97, hidden_size=48, intermediate_size=50, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, eos_token_id=None, pad_token_id=0)
models = {
    "llama, 3 key/value heads": LlamaForCausalLM(LlamaConfig(**{**base, "num_key_value_heads": 3})),
    "qwen3, tied, 1 key/value head": Qwen3ForCausalLM(Qwen3Config(**{**base, "num_key_value_heads": 1,
                                                                   "tie_word_embeddings": True})),
}
x = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(0))
for what, model in models.items():
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2: p.mul_(6.0)
    folder = os.path.join(os.path.dirname(__file__), what.split(",")[0])
    model.save_pretrained(folder); dist.barrier()  # only rank 0 writes
    one = AutoModelForCausalLM.from_pretrained(folder).eval()
    split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=world)).eval()
    with torch.no_grad():
        close(split(x.to("tpu")).logits, one(x).logits, what, 1e-3, 1e-3)
    given = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    want = one.generate(x, **given)
    same(split.generate(x.to("tpu"), **given).tolist(), want.tolist(), what)
    same(split.generate(x, cache_implementation="static", **given).tolist(), want.tolist(), what + ", compiled")
    one(x, labels=x).loss.backward(); split(x.to("tpu"), labels=x.to("tpu")).loss.backward()
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        want = getattr(one.model.layers[0].self_attn, part).weight.grad
        got = getattr(split.model.layers[0].self_attn, part).weight.grad
        close(got.full_tensor() if hasattr(got, "full_tensor") else got, want, f"{what}: {part}", 1e-3, 1e-4)
import torch_tpu
raises(ValueError, "DTensor", lambda: torch_tpu.quantize(split))
raises(ValueError, "tp_size=2", lambda: AutoModelForCausalLM.from_pretrained(
    folder, distributed_config=DistributedConfig(tp_size=world), quantization_config=torch_tpu.TpuQuantConfig("int8")))
"""


FAMILIES = """
from transformers import AutoModelForCausalLM, Glm4Config, Glm4ForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
warnings.simplefilter("ignore")
text = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, eos_token_id=None, pad_token_id=0)
experts = dict(num_local_experts=4, num_experts_per_tok=2)
models = {
    # 9 query and 3 key/value heads: of 4 ranks one has no head, and must take part in every collective all the same.
    "llama": LlamaForCausalLM(LlamaConfig(**{**text, "num_attention_heads": 9, "num_key_value_heads": 3,
                                              "hidden_size": 36})),
    "glm4": Glm4ForCausalLM(Glm4Config(**text)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**text, tie_word_embeddings=True)),
    "mixtral": MixtralForCausalLM(MixtralConfig(**text, **experts)),
    "qwen3_moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**text, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
                                                    moe_intermediate_size=24, norm_topk_prob=True)),
}
replicated = {"model.layers.*.self_attn." + part: "replicated_with_grad_allreduce"
              for part in ("q_proj", "k_proj", "v_proj", "o_proj")}
x = torch.randint(3, 95, (2, 7), generator=torch.Generator().manual_seed(0))
given = dict(max_new_tokens=6, min_new_tokens=6, pad_token_id=0)
for what, model in models.items():
    if what not in WANTED: continue
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2: p.mul_(6.0)
    folder = os.path.join(os.path.dirname(__file__), what)
    model.save_pretrained(folder); dist.barrier()
    one = AutoModelForCausalLM.from_pretrained(folder).eval()
    want = one.generate(x, do_sample=False, **given).tolist()
    split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=world)).eval()
    with torch.no_grad():
        close(split(x.to("tpu")).logits, one(x).logits, what, 1e-3, 1e-3)
    same(split.generate(x, do_sample=False, **given).tolist(), want, what)
    same(split.generate(x, do_sample=False, cache_implementation="static", **given).tolist(), want, what + ", static")
    torch.manual_seed(0)
    drawn = [None] * world
    dist.all_gather_object(drawn, split.generate(x, do_sample=True, cache_implementation="static", **given).tolist())
    same(drawn, [drawn[0]] * world, what + ", sampled")
    again = os.path.join(os.path.dirname(__file__), what + "-again")
    split.save_pretrained(again); dist.barrier()
    for (name, p), q in zip(one.named_parameters(), AutoModelForCausalLM.from_pretrained(again).parameters()):
        assert torch.equal(p, q), f"{what}: {name}"
if "glm4" in WANTED:
    split = AutoModelForCausalLM.from_pretrained(os.path.join(os.path.dirname(__file__), "glm4"), distributed_config=
        DistributedConfig(tp_size=world, tp_plan={**models["glm4"].tp_plan, **replicated})).eval()
    one = models["glm4"].eval()
    want = one.generate(x, do_sample=False, **given).tolist()
    same(split.generate(x, do_sample=False, cache_implementation="static", **given).tolist(), want, "glm4, override")
"""


def test_families_on_two_ranks(tmp_path):
    run(tmp_path, 'WANTED = ("mixtral", "qwen3_moe")' + FAMILIES, seconds=400)


@pytest.mark.slow
def test_families_on_four_ranks(tmp_path):
    run(tmp_path, 'WANTED = ("llama", "glm4", "qwen3", "mixtral", "qwen3_moe")' + FAMILIES, ranks=4, seconds=900)


def test_heads_that_two_ranks_do_not_divide_and_tied_weights(tmp_path):
    run(tmp_path, TENSOR_PARALLEL)


def test_accelerate_trains_on_two_ranks(tmp_path):
    run(tmp_path, """
        from accelerate import Accelerator
        accelerator = Accelerator()
        same((accelerator.num_processes, accelerator.process_index, accelerator.device.type), (2, rank, "tpu"))
        model = nn.Linear(4, 2); reference = copy.deepcopy(model)
        data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y)); optimizer.step(); optimizer.zero_grad()
        x, y = data.tensors
        plain = torch.optim.SGD(reference.parameters(), 0.1)
        nn.functional.mse_loss(reference(x), y).backward(); plain.step()
        close(accelerator.unwrap_model(model).weight, reference.weight, "weights")
        same(accelerator.gather(torch.tensor([rank], device="tpu")).tolist(), [0, 1])
    """, init=False)
