"""Collectives of two and three ranks against gloo's, which runs in the same processes on CPU tensors."""

from pathlib import Path

import pytest
from launcher import run

SCRIPT = (Path(__file__).parent / "against_gloo.py").read_text()


def test_every_collective_as_gloo(tmp_path):
    run(tmp_path, SCRIPT, ranks=2, init=False)


@pytest.mark.slow
def test_every_collective_as_gloo_in_groups_of_four_three_and_two(tmp_path):
    run(tmp_path, SCRIPT, ranks=4, init=False, seconds=600)


@pytest.mark.slow
def test_every_collective_as_an_xla_program(tmp_path):
    run(tmp_path, SCRIPT, ranks=3, init=False, seconds=600, TORCH_TPU_EAGER_COLLECTIVES="program")


def test_odd_forms_on_three_ranks_and_subgroups_that_overlap(tmp_path):
    run(tmp_path, """
        first, last = dist.new_group([0, 1]), dist.new_group([1, 2])
        x = torch.tensor([1.0 + rank]).to("tpu")
        if rank < 2: dist.all_reduce(x, group=first); same(x.item(), 3.0)
        if rank > 0: dist.all_reduce(x, group=last); same(x.item(), 6.0)
        sizes = [2, 1, 3]
        parts = [torch.empty(n, device="tpu") for n in sizes]
        dist.all_gather(parts, torch.full((sizes[rank],), float(rank)).to("tpu"))
        same([p.tolist() for p in parts], [[0.0, 0.0], [1.0], [2.0, 2.0, 2.0]], "uneven gather")
        ins = [torch.full((n,), 1.0 + rank).to("tpu") for n in sizes]
        out = torch.empty(sizes[rank], device="tpu"); dist.reduce_scatter(out, ins)
        same(out.tolist(), [6.0] * sizes[rank], "uneven reduce_scatter")
        ins = [torch.full((rank + 1,), float(10 * rank + r)).to("tpu") for r in range(3)]
        outs = [torch.empty(r + 1, device="tpu") for r in range(3)]
        dist.all_to_all(outs, ins)
        same([o.tolist() for o in outs], [[float(10 * r + rank)] * (r + 1) for r in range(3)], "all_to_all")
        got = [torch.empty(2, device="tpu") for _ in range(3)] if rank == 1 else None
        dist.gather(torch.full((2,), float(rank)).to("tpu"), got, dst=1)
        if rank == 1: same([g.tolist() for g in got], [[0.0] * 2, [1.0] * 2, [2.0] * 2], "gather")
        if rank == 0: dist.send(torch.tensor(5).to("tpu"), 2)
        if rank == 2: t = torch.zeros((), dtype=torch.int64, device="tpu"); dist.recv(t, 0); same(t.item(), 5, "recv")
        try:
            dist.all_reduce(torch.ones(2, device="tpu"), dist.ReduceOp.BAND)
        except TypeError as error:
            assert "integer" in str(error)
        from torch.distributed.device_mesh import init_device_mesh
        assert init_device_mesh("tpu", (3,)).size() == 3
    """, ranks=3)


def test_functional_collectives_have_gradients_and_compile_into_one_graph(tmp_path):
    output = run(tmp_path, """
        import torch.distributed._functional_collectives as fc
        warnings.simplefilter("error", RuntimeWarning)  # a graph cut into pieces warns
        world_group = dist.group.WORLD
        x = (torch.arange(4.0) + rank).to("tpu")
        gather = getattr(fc, "all_gather_single_autograd", None) or fc.all_gather_tensor_autograd
        y = x.clone().requires_grad_()
        gather(y, 0, world_group).sum().backward()
        same(y.grad.tolist(), [2.0] * 4, "gradient")
        alone = [dist.new_group([r]) for r in range(world)]
        def f(x):
            y = x * 2
            dist.all_reduce(y)
            z = fc.all_gather_single(y + x, 0, world_group)
            z = fc.reduce_scatter_single(z, "sum", 0, world_group)
            return fc.all_reduce(z, "max", alone[rank]) + fc.all_to_all_single(y, None, None, world_group)
        close(torch.compile(f, backend="tpu", fullgraph=True)(x), f(x), "compiled")
        same(len(torch.tpu.compiler.stats().graphs), 1, "graphs")
    """)
    assert "cut into" not in output


def test_collectives_that_dynamo_does_not_know_are_in_the_graph_too(tmp_path):
    run(tmp_path, """
        warnings.simplefilter("error", RuntimeWarning)  # a graph cut into pieces warns
        def broadcast(x):
            y = x * 2; dist.broadcast(y, 1); return y + 1
        def reduce(x):
            y = x * 2; dist.reduce(y, 1, op=dist.ReduceOp.MAX); return y + 1
        def gather(x):
            parts = [torch.empty_like(x) for _ in range(world)] if rank == 1 else None
            dist.gather(x * 2, parts, dst=1)
            return torch.stack(parts) if rank == 1 else x
        def scatter(x):
            y = torch.empty_like(x); dist.scatter(y, [x, x * 3] if rank == 0 else None, src=0); return y + 1
        def exchange(x):
            parts = [torch.empty_like(x) for _ in range(world)]
            dist.all_to_all(parts, [x + 1, x + 2]); return torch.stack(parts)
        def sums(x):
            y = torch.empty_like(x); dist.reduce_scatter(y, [x, x * 2]); return y
        x = (torch.arange(4.0) + 10 * rank).to("tpu")
        for number, f in enumerate((broadcast, reduce, gather, scatter, exchange, sums), 1):
            close(torch.compile(f, backend="tpu", fullgraph=True)(x), f(x), f.__name__)
            same(len(torch.tpu.compiler.stats().graphs), number, "graphs")
    """)


def test_the_device_before_the_group(tmp_path):
    run(tmp_path, """
        x = torch.ones(2, device="tpu") + rank
        dist.init_process_group("tpu")
        dist.all_reduce(x)
        same(x.tolist(), [3.0, 3.0])
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,tpu:tpu_dist")
        dist.all_reduce(x)
        c = torch.ones(2); dist.all_reduce(c)
        same((x.tolist(), c.tolist()), ([6.0, 6.0], [2.0, 2.0]))
    """, init=False)
