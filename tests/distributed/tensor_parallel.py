"""Runs under torchrun (test_tensors.py): DTensor, parallelize_module, context parallelism and pipelines."""

import copy

import torch
from parallel import BASE, BATCHES, RANK, WORLD, close, fresh, run, same_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, randn, zeros
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

attention = F.scaled_dot_product_attention


def mesh_of_all():
    return init_device_mesh("tpu", (WORLD,))


def operators() -> None:
    mesh = mesh_of_all()
    torch.manual_seed(5)
    a, b = torch.randn(7, 10), torch.randn(10, 5)
    for left in (Shard(0), Shard(1), Replicate()):
        one = distribute_tensor(a.to("tpu"), mesh, [left])
        for right in (Shard(0), Shard(1), Replicate()):
            other = distribute_tensor(b.to("tpu"), mesh, [right])
            close(one @ other, a @ b, f"{left} @ {right}")
            close(one.redistribute(mesh, [right]), a, f"{left} to {right}")
    divided = distribute_tensor(a.to("tpu"), mesh, [Shard(0)])
    for function in (torch.relu, torch.sum, lambda t: t.mean(0), lambda t: t.softmax(-1), lambda t: t.t().contiguous(),
                     torch.max, lambda t: t.argmax(-1), lambda t: torch.cat([t, t]), lambda t: t[1:4], torch.norm,
                     lambda t: t.sort(-1)[0], lambda t: torch.where(t > 0, t, -t), lambda t: t.cumsum(1),
                     lambda t: F.layer_norm(t, (10,)), lambda t: t.clone().add_(1), lambda t: t.logsumexp(0)):
        close(function(divided).float(), function(a).float())
    assert zeros(5, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor().tolist() == [[0.0] * 3] * 5


def random_numbers() -> None:
    """Different on each shard, the same where ranks hold the same."""
    mesh = mesh_of_all()
    torch.manual_seed(3)
    drawn = randn(8, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    assert drawn.unique().numel() == 32
    torch.manual_seed(3)
    assert torch.equal(randn(8, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), drawn)
    ones = distribute_tensor(torch.ones(16, 8).to("tpu"), mesh, [Replicate()])
    whole = F.dropout(ones, 0.5)
    parts = whole.to_local().chunk(WORLD)[RANK]
    close(distribute_tensor(whole.to_local(), mesh, [Shard(0)]).to_local(), parts, "dropout")


def shared_attention() -> None:
    mesh = mesh_of_all()
    torch.manual_seed(2)
    for kv_heads in (2,):
        tensors = [torch.randn(4, heads, 8, 8) for heads in (4, kv_heads, kv_heads)]
        bias = torch.randn(4, 1, 8, 8)
        leaves = [t.clone().requires_grad_() for t in (*tensors, bias)]
        want = attention(*leaves[:3], attn_mask=leaves[3], enable_gqa=True)
        want.square().sum().backward()
        for place in (Shard(0), Shard(1), Shard(2)):
            split = [distribute_tensor(t.to("tpu"), mesh, [place]).requires_grad_() for t in tensors]
            split.append(distribute_tensor(bias.to("tpu"), mesh, [Replicate()]).requires_grad_())
            got = attention(*split[:3], attn_mask=split[3], enable_gqa=True)
            got.square().sum().backward()
            close(got, want, f"{kv_heads} {place}")
            for mine, theirs in zip(split, leaves):
                close(mine.grad, theirs.grad, f"gradient, {kv_heads} {place}")
            attention(*split[:3], dropout_p=0.5, enable_gqa=True)


def ring_attention() -> None:
    mesh = mesh_of_all()
    torch.manual_seed(2)
    *tensors, upstream = (torch.randn(2, 2, 16, 8) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in tensors]
    want = attention(*leaves, is_causal=True)
    want.backward(upstream)
    for method in ("allgather", "alltoall"):
        set_rotate_method(method)
        given = [t.clone().to("tpu") for t in (*tensors, upstream)]
        with context_parallel(mesh, buffers=given, buffer_seq_dims=[2] * 4):
            mine = [t.detach().clone().requires_grad_() for t in given[:3]]
            got = F.scaled_dot_product_attention(*mine, is_causal=True)
            got.backward(given[3])
            results = context_parallel_unshard(mesh, [got.detach(), *(t.grad for t in mine)], [2] * 4)
        for result, expected in zip(results, [want, *(t.grad for t in leaves)]):
            close(result, expected, method)


def styles() -> None:
    mesh = mesh_of_all()
    model, one = fresh(), copy.deepcopy(BASE)
    parallelize_module(model, mesh, {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ids, targets = BATCHES[0][:, :-1], BATCHES[0][:, 1:]
    with loss_parallel():
        loss = F.cross_entropy(model(ids.to("tpu")).flatten(0, 1), targets.flatten().to("tpu"))
        loss.backward()
    want = one(ids, targets)
    want.backward()
    close(loss, want, "loss")
    same_gradients(model, one)


def sequences() -> None:
    mesh = mesh_of_all()
    torch.manual_seed(3)
    one = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    x = torch.randn(2, 8, 16)
    split = parallelize_module(copy.deepcopy(one).to("tpu"), mesh, {
        "0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1))})
    got = split(x.chunk(WORLD, 1)[RANK].to("tpu"))
    close(got, one(x).chunk(WORLD, 1)[RANK])
    got.square().sum().backward()
    one(x).square().sum().backward()
    same_gradients(split, one)


def pipelines() -> None:
    torch.manual_seed(9)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2 * WORLD)]
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    one = nn.Sequential(*copy.deepcopy(stages))
    want = sum(F.mse_loss(one(a), b) / 4 for a, b in zip(x.chunk(4), y.chunk(4)))
    want.backward()
    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        if schedule in (ScheduleGPipe, Schedule1F1B):
            numbers = [[2 * RANK, 2 * RANK + 1]]
            parts = [nn.Sequential(*copy.deepcopy(stages[2 * RANK:2 * RANK + 2])).to("tpu")]
            run_ = schedule(PipelineStage(parts[0], RANK, WORLD, torch.device("tpu")), 4, loss_fn=F.mse_loss)
        else:
            numbers = [[RANK], [RANK + WORLD]]
            parts = [nn.Sequential(copy.deepcopy(stages[number])).to("tpu") for (number,) in numbers]
            run_ = schedule([PipelineStage(part, number, 2 * WORLD, torch.device("tpu"))
                             for part, (number,) in zip(parts, numbers)], 4, loss_fn=F.mse_loss)
        losses: list[torch.Tensor] = []
        first, last = (x.to("tpu"),) if RANK == 0 else (), RANK == WORLD - 1
        run_.step(*first, **({"target": y.to("tpu"), "losses": losses} if last else {}))
        for part, those in zip(parts, numbers):
            same_gradients(part, nn.Sequential(*(one[number] for number in those)))
        if last:
            close(torch.stack(losses).sum() / 4, want, schedule.__name__)


if __name__ == "__main__":
    run(operators, random_numbers, shared_attention, ring_attention, styles, sequences, pipelines)
