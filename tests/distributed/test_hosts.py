"""Two hosts with two processes each: two network namespaces, joined by a pair of virtual Ethernet devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launcher import PRELUDE

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces with the addresses above, on a device `eth`."""
    if shutil.which("ip") is None:
        pytest.skip("the program ip (iproute2) is not installed")
    tag = uuid.uuid4().hex[:6]
    names = [f"tpu{tag}a", f"tpu{tag}b"]
    try:
        _ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    try:
        _ip("netns", "add", names[1])
        _ip("link", "add", "eth", "netns", names[0], "type", "veth", "peer", "name", "eth", "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth")
            _ip("-n", name, "link", "set", "eth", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def run_on(hosts: Sequence[str], commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]],
           seconds: float = 240) -> str:
    """The output of a command on each host; all must succeed."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    base = {k: v for k, v in os.environ.items() if k not in dropped}
    # Gloo's groups of CPU tensors go by the host's name, which is the same in both namespaces.
    base.update(GLOO_SOCKET_IFNAME="eth")
    base.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")
    running = [subprocess.Popen(["ip", "netns", "exec", host, sys.executable, *command], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, env={**base, **extra})
               for host, command, extra in zip(hosts, commands, environments)]
    said = []
    try:
        for process in running:
            said.append(process.communicate(timeout=seconds)[0])
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), "\n=====\n".join(text[-4000:] for text in said)
    return "".join(said)


def script(folder: Path, body: str) -> str:
    path = folder / "body.py"
    path.write_text(PRELUDE + "dist.init_process_group(timeout=timedelta(seconds=60))\n" + textwrap.dedent(body)
                    + "\nos.write(1, f'\\nFINISHED {rank}\\n'.encode())\n")
    return str(path)


WORK = """
assert world == 4 and os.environ["LOCAL_WORLD_SIZE"] == "2" and int(os.environ["LOCAL_RANK"]) == rank % 2
x = torch.ones(5, device="tpu") * (rank + 1)
dist.all_reduce(x); same(x.tolist(), [10.0] * 5)
across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
y = torch.ones(2, device="tpu") * rank
dist.all_reduce(y, group=across); same(y.tolist(), [2.0 * (rank % 2) + 2] * 2)
def f(x):
    y = x + 1
    dist.all_reduce(y)
    return y * 2
same(torch.compile(f, backend="tpu", fullgraph=True)(torch.ones(3, device="tpu")).tolist(), [16.0] * 3)
base = nn.Linear(6, 2); xs, ys = torch.randn(8, 6), torch.randn(8, 2)
model = nn.parallel.DistributedDataParallel(copy.deepcopy(base).to("tpu"))
for m, a, b in ((base, xs, ys), (model, xs.chunk(4)[rank].to("tpu"), ys.chunk(4)[rank].to("tpu"))):
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    nn.functional.mse_loss(m(a), b).backward(); optimizer.step()
close(model.module.weight, base.weight, "a step")
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
warnings.simplefilter("ignore")
folder = os.path.join(os.path.dirname(__file__), "model")
if rank == 0:
    LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                 eos_token_id=None, pad_token_id=0)).save_pretrained(folder)
dist.barrier()
tokens = torch.randint(3, 96, (1, 7), generator=torch.Generator().manual_seed(0))
one = AutoModelForCausalLM.from_pretrained(folder).eval()
split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=4)).eval()
given = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
same(split.generate(tokens.to("tpu"), **given).tolist(), one.generate(tokens, **given).tolist(), "tokens")
"""


def _finished(output: str) -> None:
    for rank in range(4):
        assert f"FINISHED {rank}" in output, output[-4000:]


def test_torchrun_on_two_hosts(tmp_path, hosts):
    body = script(tmp_path, WORK)
    commands = [["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", f"--master-addr={ADDRESSES[0]}",
                 "--master-port=29511", "--nproc-per-node=2", body] for host in range(2)]
    _finished(run_on(hosts, commands, [{}, {}]))


@pytest.mark.slow
def test_the_variables_of_a_cluster(tmp_path, hosts):
    """As GKE sets them: TPU_WORKER_HOSTNAMES and TPU_WORKER_ID are all that the launcher needs."""
    body = script(tmp_path, WORK)
    given = [{"TPU_WORKER_HOSTNAMES": ",".join(ADDRESSES), "TPU_WORKER_ID": str(host)} for host in range(2)]
    _finished(run_on(hosts, [["-m", "torch_tpu.launch", "--nproc-per-node=2", body]] * 2, given))
