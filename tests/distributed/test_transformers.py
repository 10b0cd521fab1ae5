"""Transformers' tensor parallelism and Accelerate on two ranks, with tiny models, against one process on the CPU."""

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
"""


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
