"""DDP, FSDP2, DTensor and tensor parallelism on two ranks against one process on the CPU."""

from launcher import run

TRAINING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(3, 3)
    def forward(self, x): return self.b(torch.tanh(self.a(x)))
base = Net()
xs, ys = torch.randn(4, 8, 6), torch.randn(4, 8, 2)
ref = copy.deepcopy(base); ro = torch.optim.AdamW(ref.parameters(), 0.01)
for a, b in zip(xs, ys):
    ro.zero_grad(); nn.functional.mse_loss(ref(a), b).backward(); ro.step()
from torch.nn.parallel import DistributedDataParallel as DDP
m = DDP(copy.deepcopy(base).to("tpu"), find_unused_parameters=True); mo = torch.optim.AdamW(m.parameters(), 0.01)
for a, b in zip(xs, ys):
    mo.zero_grad()
    nn.functional.mse_loss(m(a.chunk(2)[rank].to("tpu")), b.chunk(2)[rank].to("tpu")).backward()
    mo.step()
for (n, p), q in zip(m.module.named_parameters(), ref.parameters()): close(p, q, n)
from torch.distributed.fsdp import fully_shard
f = copy.deepcopy(base).to("tpu")
fully_shard(f.a); fully_shard(f.b); fully_shard(f)
fo = torch.optim.AdamW(f.parameters(), 0.01)
for a, b in zip(xs, ys):
    fo.zero_grad()
    nn.functional.mse_loss(f(a.chunk(2)[rank].to("tpu")), b.chunk(2)[rank].to("tpu")).backward()
    fo.step()
for (n, p), q in zip(f.named_parameters(), ref.parameters()): close(p.full_tensor(), q, n)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel
mesh = init_device_mesh("tpu", (2,))
w = torch.randn(7, 4)
d = distribute_tensor(w.to("tpu"), mesh, [Shard(0)])
close(d.full_tensor(), w, "dtensor uneven"); close(d.redistribute(mesh, [Replicate()]).to_local(), w)
t = parallelize_module(copy.deepcopy(base).to("tpu"), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
close(t(xs[0].to("tpu")), base(xs[0]), "tp")
t(xs[0].to("tpu")).sum().backward(); base(xs[0]).sum().backward()
close(t.a.weight.grad.full_tensor(), base.a.weight.grad, "tp grad")
"""


def test_ddp_fsdp2_and_dtensor_as_one_process(tmp_path):
    run(tmp_path, TRAINING)
