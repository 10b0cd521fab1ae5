"""Runs under torchrun (test_collectives.py): every collective of tpu tensors, and gloo's on CPU tensors, on the same
inputs, in the world and in groups that overlap. What gloo lacks is compared with torch's own arithmetic over the parts.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Op = dist.ReduceOp
NATIVE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32,
          torch.int64)
OTHER = (torch.bool, torch.int16, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (3, 5), (0,), (2, 0, 3), (33, 31))
FEW: tuple[tuple[int, ...], ...] = ((), (7,))


def value(kind: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small numbers, so that sums and products are exact in every dtype."""
    drawn = torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(seed))
    if kind == torch.bool:
        return drawn > 2
    return torch.complex(drawn.float(), -drawn.float()).to(kind) if kind.is_complex else drawn.to(kind)


def same(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert got.device.type == "tpu" and got.dtype == want.dtype and got.shape == want.shape, (what, got, want)
    narrow = want.dtype.is_floating_point and want.dtype.itemsize == 1
    torch.testing.assert_close(got.detach().cpu().float() if narrow else got.detach().cpu(),
                               want.float() if narrow else want, rtol=1e-3, atol=1e-6, equal_nan=True,
                               msg=lambda m: f"rank {dist.get_rank()} {what}: {m}")


def parts_of(mine: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Every rank's tensor, carried by gloo as bytes."""
    size = dist.get_world_size(group)
    if not mine.numel():
        return [mine.clone() for _ in range(size)]
    got = [torch.empty(mine.nbytes, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(got, mine.contiguous().reshape(-1).view(torch.uint8), group=group)
    return [each.view(mine.dtype).view(mine.shape) for each in got]


def reduced(parts: list[torch.Tensor], op: Any, factor: float = 1.0) -> torch.Tensor:
    """Torch's own reduction: float8 in float32, bool sums and products as or and and."""
    kind = parts[0].dtype
    wide = torch.float32 if kind.is_floating_point and kind.itemsize == 1 else kind
    total = parts[0].to(wide)
    for part in parts[1:]:
        other = part.to(wide)
        if op == Op.SUM:
            total = total | other if kind == torch.bool else total + other
        elif op == Op.PRODUCT:
            total = total & other if kind == torch.bool else total * other
        else:
            named: dict[Any, Callable[..., torch.Tensor]] = {
                Op.MIN: torch.minimum, Op.MAX: torch.maximum, Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or,
                Op.BXOR: torch.bitwise_xor}
            total = named[op](total, other)
    return (total * factor if factor != 1.0 else total).to(kind)


def reductions(group: Any, kinds: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for kind in kinds:
        ops = [Op.SUM, Op.PRODUCT] if not kind.is_complex else [Op.SUM]
        ops += [Op.MIN, Op.MAX] if not kind.is_complex else []
        ops += [Op.BAND, Op.BOR, Op.BXOR] if not kind.is_floating_point and not kind.is_complex else []
        for shape in shapes:
            mine = value(kind, shape, rank)
            parts = parts_of(mine, group)
            for op in ops:
                what = f"{op} {kind} {shape} size {size}"
                if kind in NATIVE and mine.numel():
                    want = mine.clone()
                    dist.all_reduce(want, op, group=group)
                else:
                    want = reduced(parts, op)
                got = mine.to("tpu")
                assert dist.all_reduce(got, op, group=group) is None
                same(got, want, what)
                got = mine.to("tpu")
                dist.reduce(got, group_dst=size - 1, op=op, group=group)
                if rank == size - 1:
                    same(got, want, f"reduce {what}")
                # This rank's row of everybody's rows.
                rows = torch.stack([value(kind, shape, 10 * rank + i) for i in range(size)])
                if kind.is_complex:
                    continue
                everyone = parts_of(rows, group)
                out = torch.empty(shape, dtype=kind, device="tpu")
                dist.reduce_scatter_single(out, rows.to("tpu"), op, group=group)
                same(out, reduced([each[rank] for each in everyone], op), f"reduce_scatter {what}")


def other_reductions(group: Any) -> None:
    """Averages and factors, which gloo refuses."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        mine = value(kind, (5,), rank)
        total = reduced(parts_of(mine, group), Op.SUM)
        got = mine.to("tpu")
        dist.all_reduce(got, Op.AVG, group=group)
        same(got, total / size, f"avg {kind}")
        for factor in (0.5, torch.tensor([0.25], dtype=kind)):
            got = mine.to("tpu")
            dist.all_reduce(got, dist._make_nccl_premul_sum(factor), group=group)
            same(got, total * (factor if isinstance(factor, float) else 0.25), f"premul {kind}")
        out = torch.empty(5, dtype=kind, device="tpu")
        dist.reduce_scatter_single(out, mine.repeat(size).to("tpu"), dist._make_nccl_premul_sum(0.5), group=group)
        same(out, total * 0.5, "premul reduce_scatter")
    whole = torch.tensor([size * 3], device="tpu")
    dist.all_reduce(whole, Op.AVG, group=group)
    same(whole, torch.tensor([size * 3]), "average of integers")
    for op, kind in ((Op.BAND, torch.float32), (Op.AVG, torch.bool), (dist._make_nccl_premul_sum(2.0), torch.int32)):
        try:
            dist.all_reduce(torch.ones(2, dtype=kind, device="tpu"), op, group=group)
        except TypeError as error:
            assert str(kind) in str(error) or "bool" in str(error)
        else:
            raise AssertionError(f"{op} of {kind} is no error")


def exchanges(group: Any, kinds: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for kind in kinds:
        for shape in shapes:
            what = f"{kind} {shape} size {size}"
            mine = value(kind, shape, rank)
            parts = parts_of(mine, group)
            for root in (0, size - 1):
                got = mine.to("tpu")
                dist.broadcast(got, group_src=root, group=group)
                same(got, parts[root], f"broadcast {what}")
                takes = [torch.zeros_like(mine, device="tpu") for _ in range(size)] if rank == root else None
                dist.gather(mine.to("tpu"), takes, group_dst=root, group=group)
                for got, want in zip(takes or [], parts):
                    same(got, want, f"gather {what}")
                got = torch.zeros_like(mine, device="tpu")
                rows = [value(kind, shape, 20 + i) for i in range(size)]
                dist.scatter(got, [row.to("tpu") for row in rows] if rank == root else None, group_src=root,
                             group=group)
                same(got, rows[rank], f"scatter {what}")
            takes = [torch.zeros_like(mine, device="tpu") for _ in range(size)]
            dist.all_gather(takes, mine.to("tpu"), group=group)
            for got, want in zip(takes, parts):
                same(got, want, f"all_gather {what}")
            got = torch.zeros((size, *shape), dtype=kind, device="tpu")
            dist.all_gather_single(got, mine.to("tpu"), group=group)
            same(got, torch.stack(parts), f"all_gather_single {what}")
            rows_ = torch.stack([value(kind, shape, 10 * rank + i) for i in range(size)])
            want_ = torch.stack([each[rank] for each in parts_of(rows_, group)])
            got = torch.zeros_like(rows_, device="tpu")
            dist.all_to_all_single(got, rows_.to("tpu"), group=group)
            same(got, want_, f"all_to_all_single {what}")
            takes = [torch.zeros_like(mine, device="tpu") for _ in range(size)]
            dist.all_to_all(takes, [row.to("tpu") for row in rows_], group=group)
            for got, want in zip(takes, want_):
                same(got, want, f"all_to_all {what}")


def pieces_of_different_sizes(group: Any) -> None:
    """Rank i sends i + j + 1 elements (times three in a row) to rank j; and lists with another length for each rank."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts = [rank + j for j in range(size)]  # 0 from the first rank to itself
    for kind in (torch.float32, torch.bfloat16, torch.int64):
        sent = value(kind, (sum(counts), 3), rank)
        want, got = torch.empty_like(sent), torch.empty_like(sent, device="tpu")
        if kind == torch.bfloat16:  # gloo's own has no such dtype
            dist.all_to_all_single(want.view(torch.uint8), sent.view(torch.uint8), counts, counts, group=group)
        else:
            dist.all_to_all_single(want, sent, counts, counts, group=group)
        dist.all_to_all_single(got, sent.to("tpu"), counts, counts, group=group)
        same(got, want, f"uneven {kind}")
        takes = [torch.empty(n, 3, dtype=kind, device="tpu") for n in counts]
        dist.all_to_all(takes, list(sent.to("tpu").split(counts)), group=group)
        same(torch.cat(takes), want, f"uneven list {kind}")
    whole = [torch.empty(n + 1, device="tpu") for n in range(size)]
    dist.all_gather(whole, torch.full((rank + 1,), float(rank), device="tpu"), group=group)
    for n, got in enumerate(whole):
        same(got, torch.full((n + 1,), float(n)), "all_gather of different lengths")
    got = torch.empty(rank + 1, device="tpu")
    dist.reduce_scatter(got, [torch.full((n + 1,), 1.0 + rank, device="tpu") for n in range(size)], group=group)
    same(got, torch.full((rank + 1,), size * (size + 1) / 2), "reduce_scatter of different lengths")
    try:
        wrong = [1] * size
        dist.all_to_all_single(torch.empty(size + (rank == 0), device="tpu"), torch.ones(size, device="tpu"),
                               [1 + (rank == 0), *wrong[1:]], wrong, group=group)
    except ValueError as error:
        assert "sends 1 elements to rank" in str(error) and "expects 2" in str(error), error
    else:
        raise AssertionError("pieces that do not fit are no error")


def strides_and_views(group: Any) -> None:
    """Inputs and outputs that are windows of other tensors."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    base = torch.arange(24.0).view(4, 6) + rank
    for window in (lambda t: t.t(), lambda t: t[1:3], lambda t: t[:, ::2], lambda t: t[2, 1:]):
        want, got = base.clone(), base.to("tpu")
        piece = window(want).contiguous()
        dist.all_reduce(piece, group=group)
        window(want).copy_(piece)
        dist.all_reduce(window(got), group=group)
        same(got, want, "a window reduced in place")
        want, got = base.clone(), base.to("tpu")
        piece = window(want).contiguous()
        dist.broadcast(piece, group_src=size - 1, group=group)
        window(want).copy_(piece)
        dist.broadcast(window(got), group_src=size - 1, group=group)
        same(got, want, "a window broadcast")
    buffer = torch.zeros(size, 3, device="tpu")
    dist.all_gather(list(buffer.unbind(0)), torch.arange(3.0, device="tpu") + rank, group=group)
    same(buffer, torch.stack([torch.arange(3.0) + r for r in range(size)]), "all_gather into views")
    got = torch.zeros(3, 2 * size, device="tpu")
    dist.all_gather_single(got.t(), torch.full((2, 3), float(rank), device="tpu"), group=group)
    same(got, torch.arange(float(size)).repeat_interleave(2).repeat(3, 1), "all_gather into a transposed tensor")


def handles(group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sums = size * (size + 1) / 2
    works = []
    tensors = [torch.full((n,), 1.0 + rank, device="tpu") for n in (3, 1000, 1)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work, tensor in zip(reversed(works), reversed(tensors)):
        assert work.wait() and work.is_completed() and work.is_success()
        same(tensor, torch.full_like(tensor, sums, device="cpu"), "async")
    tensor = torch.full((4,), 1.0 + rank, device="tpu")
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    same(future.then(lambda f: f.value()[0] * 2).wait(), torch.full((4,), 2 * sums), "future")
    before = torch.full((5,), 1.0 + rank, device="tpu")
    reader = before * 2  # launched before the collective writes: it reads the old values
    dist.all_reduce(before, group=group)
    same(reader, torch.full((5,), 2.0 + 2 * rank), "an operator launched before")
    if size == dist.get_world_size():
        tensors = [torch.full((n,), 1.0 + rank, device="tpu") for n in (2, 3)]
        with dist._coalescing_manager(group=group, device=torch.device("tpu"), async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        manager.wait()
        for tensor in tensors:
            same(tensor, torch.full_like(tensor, sums, device="cpu"), "coalesced")
        outs = [torch.empty(size * n, device="tpu") for n in (2, 3)]
        with dist._coalescing_manager(group=group, device=torch.device("tpu")):
            for out, n in zip(outs, (2, 3)):
                dist.all_gather_single(out, torch.full((n,), float(rank), device="tpu"), group=group)
        for out, n in zip(outs, (2, 3)):
            same(out, torch.arange(float(size)).repeat_interleave(n), "coalesced all_gather")
        outs = [torch.empty(n, device="tpu") for n in (2, 3)]
        with dist._coalescing_manager(group=group, device=torch.device("tpu")):
            for out, n in zip(outs, (2, 3)):
                dist.reduce_scatter_single(out, torch.full((n * size,), 1.0 + rank, device="tpu"), group=group)
        for out in outs:
            same(out, torch.full_like(out, sums, device="cpu"), "coalesced reduce_scatter")


def objects_and_barriers(group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    got: list[Any] = [None] * size
    dist.all_gather_object(got, {"rank": rank, "tensor": torch.tensor([rank], device="tpu")}, group=group)
    assert [each["rank"] for each in got] == list(range(size))
    assert [each["tensor"].item() for each in got] == list(range(size))
    box: list[Any] = ["x" * 50, 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(box, group_src=0, group=group)
    assert box == ["x" * 50, 3]
    takes: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank,), takes, group_dst=0, group=group)
    assert takes is None or takes == [(r,) for r in range(size)]
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, [r * "y" for r in range(size)] if rank == 0 else None, group_src=0, group=group)
    assert taken == [rank * "y"]
    dist.barrier(group=group)
    dist.barrier(group=group, async_op=True).wait()


def point_to_point(group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    for kind in (torch.float32, torch.bool, torch.float8_e5m2, torch.complex64, torch.int64, torch.bfloat16):
        for shape in ((), (5,), (2, 3)):
            mine, got = value(kind, shape, rank).to("tpu"), torch.zeros(shape, dtype=kind, device="tpu")
            works = [dist.isend(mine, group_dst=right, group=group, tag=3),
                     dist.irecv(got, group_src=left, group=group, tag=3)]
            for work in works:
                assert work is not None
                work.wait()
            same(got, value(kind, shape, left), f"ring {kind} {shape}")
    mine, got = value(torch.float32, (4, 3), rank).to("tpu"), torch.zeros(3, 4, device="tpu")
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, group=group, group_peer=right),
                                        dist.P2POp(dist.irecv, got.t(), group=group, group_peer=left)]):
        work.wait()
    same(got, value(torch.float32, (4, 3), left).t(), "a batch, into a transposed tensor")
    if rank == 0:
        for _ in range(size - 1):
            box = torch.zeros(2, device="tpu")
            source = dist.recv(box, group=group)
            same(box, torch.full((2,), float(dist.get_group_rank(group, source) if group is not dist.group.WORLD
                                             else source)), "from any rank")
    else:
        dist.send(torch.full((2,), float(rank), device="tpu"), group_dst=0, group=group)


def main(form: str) -> None:
    dist.init_process_group()
    world = dist.get_world_size()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))  # torch.distributed's own function takes gloo groups only
    members = [list(range(world)), [0, 1, 2], [1, 2]][:1 if world < 4 else 3]
    groups = [dist.group.WORLD, *(dist.new_group(each) for each in members[1:])]
    for each, group in zip(members, groups):
        if dist.get_rank() in each:
            kinds = (*NATIVE, *OTHER) if group is groups[0] else (torch.float32, torch.int64, torch.bool)
            shapes = FEW if group is groups[0] or form == "program" else SHAPES
            reductions(group, kinds, shapes)
            other_reductions(group)
            exchanges(group, kinds, shapes)
            pieces_of_different_sizes(group)
            strides_and_views(group)
            handles(group)
            objects_and_barriers(group)
            point_to_point(group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(os.environ.get("TORCH_TPU_EAGER_COLLECTIVES", "gloo"))
