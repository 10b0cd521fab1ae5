"""Collectives of two and three ranks against gloo's, which runs in the same processes on CPU tensors."""

from launcher import run

AGAINST_GLOO = """
    ops = ("SUM", "PRODUCT", "MIN", "MAX")
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32,
             torch.int64)
    for kind in kinds:
        for shape in ((), (1,), (7,), (3, 5)):
            base = (torch.arange(1, 1 + max(1, torch.Size(shape).numel())).view(shape) + rank).to(kind)
            for op in ops:
                op = getattr(dist.ReduceOp, op)
                got, want = base.to("tpu"), base.clone()
                dist.all_reduce(got, op); dist.all_reduce(want, op)
                close(got, want, f"{op} {kind} {shape}", 2e-2 if kind.itemsize == 2 else 1e-6, 1e-6)
    for op in ("BAND", "BOR", "BXOR"):
        got, want = torch.tensor([12 + rank, 10]).to("tpu"), torch.tensor([12 + rank, 10])
        dist.all_reduce(got, getattr(dist.ReduceOp, op)); dist.all_reduce(want, getattr(dist.ReduceOp, op))
        close(got, want, op)
    mean = torch.full((3,), float(rank)).to("tpu"); dist.all_reduce(mean, dist.ReduceOp.AVG)
    close(mean, torch.full((3,), (world - 1) / 2), "mean")
    for kind in (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16):
        mine = torch.tensor([rank, 1, 0]).to(kind)
        parts = [torch.zeros(3, dtype=kind, device="tpu") for _ in range(world)]
        dist.all_gather(parts, mine.to("tpu"))
        same([p.cpu().to(torch.complex64).tolist() for p in parts],
             [torch.tensor([r, 1, 0]).to(kind).to(torch.complex64).tolist() for r in range(world)], f"gather {kind}")
        one = mine.to("tpu"); dist.broadcast(one, world - 1)
        same(one.cpu().to(torch.complex64).tolist(),
             torch.tensor([world - 1, 1, 0]).to(kind).to(torch.complex64).tolist(), f"broadcast {kind}")
"""


def test_every_reduction_and_dtype_as_gloo(tmp_path):
    run(tmp_path, AGAINST_GLOO)


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
