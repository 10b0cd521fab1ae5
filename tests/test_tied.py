"""model.to("tpu") keeps parameters the objects they are: tied weights, optimizers, attributes, hooks."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from processes import python


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)) * self.scale


MOVES = {
    "to": lambda m: m.to("tpu"), "tpu": lambda m: m.tpu(), "to device and dtype": lambda m: m.to("tpu", torch.bfloat16),
    "to_empty": lambda m: m.to_empty(device="tpu"), "inside": lambda m: nn.Sequential(m).to("tpu"),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_tied_weights_stay_tied(move):
    module = Tied()
    weight = module.embed.weight
    move(module)
    assert module.embed.weight is module.head.weight is weight
    assert weight.is_tpu and weight.is_leaf and weight.requires_grad and isinstance(weight, nn.Parameter)
    assert module.scale.is_tpu
    assert torch.__future__.get_swap_module_params_on_conversion() is False


def test_there_and_back():
    module = Tied()
    weight, value = module.embed.weight, module.embed.weight.detach().clone()
    module.to("tpu").cpu()
    assert module.embed.weight is module.head.weight is weight and torch.equal(weight.detach(), value)


def test_an_optimizer_made_before_trains_the_moved_parameters():
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.to("tpu")
    module(torch.tensor([1, 2], device="tpu")).sum().backward()
    before = module.head.weight.detach().cpu()
    optimizer.step()
    assert not torch.equal(module.head.weight.detach().cpu(), before)


def test_gradients_attributes_and_hooks_move_along():
    module, seen = Tied(), []
    weight = module.embed.weight
    weight.tag = "kept"
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.device.type))
    module(torch.tensor([1])).sum().backward()
    grad = weight.grad.clone()
    module.to("tpu")
    assert weight.tag == "kept" and weight.grad.is_tpu and torch.equal(weight.grad.cpu(), grad)
    module(torch.tensor([1], device="tpu")).sum().backward()
    assert seen == ["cpu", "tpu"]


def test_a_weak_reference_costs_the_identity_not_the_tie():
    module = Tied()
    reference = weakref.ref(module.embed.weight)
    module.to("tpu")
    assert module.embed.weight is module.head.weight and module.embed.weight.is_tpu and reference is not None


def test_a_live_graph_costs_the_identity_not_the_tie():
    module = Tied()
    result = module(torch.tensor([1]))
    module.to("tpu")
    assert module.embed.weight is module.head.weight and module.embed.weight.is_tpu
    result.sum().backward()


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["alone", "inside"])
def test_recurrent_modules(wrap):
    recurrent = nn.LSTM(3, 4)
    weight = recurrent.weight_ih_l0
    wrap(recurrent).to("tpu")
    assert recurrent.weight_ih_l0 is weight is recurrent._flat_weights[0] and weight.is_tpu
    assert [ref() for ref in recurrent._flat_weight_refs] == recurrent._flat_weights


def test_other_conversions_are_pytorchs_own():
    module = Tied()
    weight = module.embed.weight
    assert module.half().embed.weight is weight and weight.dtype == torch.float16
    assert module.to("meta").embed.weight.device.type == "meta"
    on_device = nn.Linear(2, 2, device="tpu")
    weight = on_device.weight
    assert on_device.to(torch.bfloat16).weight is weight and weight.dtype == torch.bfloat16


def test_meta_modules_materialise():
    with torch.device("meta"):
        module = Tied()
    module.to_empty(device="tpu")
    assert module.embed.weight is module.head.weight and module.embed.weight.is_tpu


def test_data_assignment_between_devices():
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    same = parameter
    parameter.data = parameter.data.to("tpu")
    assert parameter is same and parameter.is_tpu and parameter.is_leaf and parameter.requires_grad
    (parameter * 3).sum().backward()
    assert parameter.grad.tolist() == [3, 3]
    parameter.data = torch.zeros(3, device="tpu")
    assert parameter.tolist() == [0, 0, 0]
    parameter.data = torch.ones(2)
    assert parameter.device.type == "cpu" and parameter.tolist() == [1, 1]


def test_data_of_cpu_parameters_in_compiled_code():
    compiled = torch.compile(lambda p: p.data + 1, backend="eager", fullgraph=True)
    assert compiled(nn.Parameter(torch.ones(2))).tolist() == [2, 2]


def test_tensor_methods():
    assert torch.ones(1).tpu().is_tpu and not torch.ones(1).is_tpu and torch.ones(1).tpu(0).device.index == 0
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert packed.tpu().is_tpu and packed.to("tpu").data.is_tpu


def test_pinned_memory():
    from torch.utils.data import DataLoader, TensorDataset

    host = torch.arange(4.0)
    pinned = host.pin_memory()
    pinned.fill_(-1)
    assert host.tolist() == [0, 1, 2, 3] and pinned.is_pinned() and not host.is_pinned()
    batches = [x.to("tpu", non_blocking=True) for x, in DataLoader(TensorDataset(host), batch_size=3, pin_memory=True)]
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3]]
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.ones(2, device="tpu", pin_memory=True)


def test_what_ddp_pins():
    done = python("""
        import torch
        from torch_tpu.integrations import torch_ddp
        torch_ddp.allow_pinned()
        made = torch.empty_like(torch.zeros(3, dtype=torch.int32), pin_memory=True)
        assert made.is_pinned() and made.dtype == torch.int32 and not torch.ones(2).is_pinned()
        assert made.copy_(torch.arange(3)).tolist() == [0, 1, 2]
        assert torch.zeros_like(torch.ones(2, 3).t()).stride() == (1, 3)
        leaf = torch.ones(2, requires_grad=True)
        (leaf.clone() * torch.zeros_like(leaf).add(2)).sum().backward()
        assert leaf.grad.tolist() == [2, 2]
        print(torch.empty_like(made, device="tpu").device)
    """, "-W", "error")
    assert done.stdout == "tpu:0\n", done.stderr
