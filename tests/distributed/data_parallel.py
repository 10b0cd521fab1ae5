"""Runs under torchrun (test_training.py): DistributedDataParallel, FSDP2 and checkpoints against one process."""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel import BASE, BATCHES, GPT, RANK, WORLD, adam, as_one_process, close, fresh, reference, run, share, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def sharded(model: nn.Module | None = None, **settings: object) -> nn.Module:
    model = fresh() if model is None else model
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def twenty_steps() -> None:
    want = reference(20)[1]
    replicated = DistributedDataParallel(fresh(), find_unused_parameters=True)
    divided = sharded()
    for model in (replicated, divided):
        mine = torch.tensor(train(model, 20))
        dist.all_reduce(mine)
        close(mine / WORLD, torch.tensor(want), "losses")
    as_one_process(replicated.module, 20)
    as_one_process(divided, 20)


def ways_of_ddp() -> None:
    for settings in ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, {"static_graph": True}):
        model = DistributedDataParallel(fresh(), **settings)
        train(model, 3)
        as_one_process(model.module, 3)
    model = DistributedDataParallel(fresh())
    train(model, 3, optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=1e-2))
    as_one_process(model.module, 3)


def accumulation() -> None:
    replicated, divided = DistributedDataParallel(fresh(), find_unused_parameters=True), sharded()
    for model in (replicated, divided):
        optimizer = adam(model.parameters())
        for batch in BATCHES[:3]:
            first, second = (half.chunk(2) for half in share(batch))
            if model is replicated:
                with model.no_sync():
                    (model(first[0], second[0]) / 2).backward()
            else:
                model.set_requires_gradient_sync(False)
                (model(first[0], second[0]) / 2).backward()
                model.set_requires_gradient_sync(True)
            (model(first[1], second[1]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    as_one_process(replicated.module, 3)
    as_one_process(divided, 3)


def ways_of_fsdp() -> None:
    for settings in ({"fused": True}, {"foreach": False}):
        model = sharded(reshard_after_forward="foreach" in settings)
        train(model, 3, 0.5, lambda p, settings=settings: adam(p, **settings))
        as_one_process(model, 3, 0.5)
    mesh = init_device_mesh("tpu", (WORLD,))
    for pinned in (True, False):
        model = sharded(copy.deepcopy(BASE), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=pinned))
        train(model, 2)
        assert model.head.weight.device.type == "cpu"
        as_one_process(model, 2)
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(model, 2)
    assert model.head.weight.dtype == torch.float32
    as_one_process(model, 2, atol=3e-2)


def from_meta() -> None:
    with torch.device("meta"):
        model = GPT()
    sharded(model).to_empty(device="tpu")
    set_model_state_dict(model, BASE.state_dict() if RANK == 0 else {},
                         options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    train(model, 2)
    as_one_process(model, 2)


def compiled() -> None:
    for model in (DistributedDataParallel(fresh()), sharded()):
        train(torch.compile(model, backend="tpu"), 2)
        as_one_process(getattr(model, "module", model), 2)
    model = DistributedDataParallel(fresh())
    step = torch.tpu.compile_step(model, optimizer=adam(model.parameters()),
                                  loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    for batch in BATCHES[:4]:
        step(*share(batch))
    as_one_process(model.module, 4)
    assert "all-reduce" in step.hlo()
    before = step.captures
    step(*share(BATCHES[4]))
    assert step.captures == before
    fails = torch.tpu.compile_step(lambda x: (dist.all_reduce(host), x + 1)[1])
    host = torch.ones(2)
    try:
        fails(torch.ones(2, device="tpu"))
    except RuntimeError as error:
        assert "collective of CPU tensors" in str(error), error
    else:
        raise AssertionError("a collective of the host was taken into a program")


def checkpoint() -> None:
    """Saved by all ranks; loaded by other numbers of them."""
    given = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(given, 0)
    folder = given[0]
    model = sharded()
    optimizer = adam(model.parameters())
    step(model, optimizer, 0)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    dcp.async_save({"model": weights}, checkpoint_id=f"{folder}/async").result()
    step(model, optimizer, 1)
    for ranks in {WORLD, WORLD // 2, 1}:
        mesh = init_device_mesh("tpu", (WORLD // ranks, ranks), mesh_dim_names=("copies", "ranks"))["ranks"]
        other = sharded(GPT().to("tpu"), mesh=mesh) if ranks > 1 else GPT().to("tpu")
        resumed = adam(other.parameters())
        weights, state = get_state_dict(other, resumed)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(other, resumed, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        step(other, resumed, 1, ranks, RANK % ranks)
        for got, want in zip(other.parameters(), model.parameters()):
            close(got, want.full_tensor(), f"{ranks} ranks")
    plain = GPT().to("tpu")
    found = {"model": plain.state_dict()}
    dcp.load(found, checkpoint_id=f"{folder}/async")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert RANK or {value.device.type for value in full.values()} == {"cpu"}
    as_one_process(plain, 1)
    as_one_process(model, 2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, parts: int = WORLD, part: int = RANK) -> None:
    model(*share(BATCHES[number], parts, part)).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_dimensions() -> None:
    """On four ranks: hybrid sharding, and FSDP2 with tensor parallelism."""
    mesh = init_device_mesh("tpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = sharded(mesh=mesh)
    train(model, 3, 0.5)
    as_one_process(model, 3, 0.5)
    model = fresh()
    for block in model.blocks:
        parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded(model, mesh=mesh["outer"])
    train(model, 3, optimizer=lambda p: adam(p, foreach=False), parts=2, part=mesh.get_local_rank("outer"))
    as_one_process(model, 3)


if __name__ == "__main__":
    if WORLD == 4:
        run(twenty_steps, two_dimensions, checkpoint)
    else:
        run(twenty_steps, ways_of_ddp, accumulation, ways_of_fsdp, from_meta, compiled, checkpoint)

