"""A rank that dies, hangs or disagrees ends the job, on all ranks and in time, with a message that names it. No process
is left behind (launcher.launch checks that)."""

import signal
import time

import pytest
from launcher import OURS, TORCHRUN, launch, run

START = """
dist.init_process_group(timeout=timedelta(seconds=8))
x = torch.ones(4, device="tpu"); dist.all_reduce(x)
"""


def test_ranks_that_disagree(tmp_path):
    """Both ranks get the error, and may go on."""
    run(tmp_path, """
        def refused(call, *words):
            try:
                call()
            except RuntimeError as error:
                for word in words:
                    assert word in str(error), (word, error)
            else:
                raise AssertionError(f"no error with {words}")
        refused(lambda: dist.all_reduce(torch.ones(4 + rank, device="tpu")), "disagree", "rank 0 calls all_reduce sum",
                "float32[4]", "rank 1 calls", "float32[5]")
        kind = (torch.float32, torch.int64)[rank]
        refused(lambda: dist.all_reduce(torch.ones(3, device="tpu", dtype=kind)), "float32[3]", "int64[3]")
        x = torch.ones(2, device="tpu")
        refused(lambda: dist.all_reduce(x) if rank else dist.broadcast(x, 1), "broadcast from 1", "all_reduce sum")
        def sums(x):
            y = x * 2
            dist.all_reduce(y, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
            return y
        refused(lambda: torch.compile(sums, backend="tpu")(x), "compiled graph with all_reduce sum(float32[2])",
                "compiled graph with all_reduce max(float32[2])")
        dist.all_reduce(x)
        same(x.tolist(), [2.0, 2.0])
    """)


def test_every_call_is_compared_on_request(tmp_path):
    """Kinds that both ranks know, in another order."""
    run(tmp_path, """
        small, large = torch.ones(2, device="tpu"), torch.ones(3, device="tpu")
        dist.all_reduce(small); dist.all_reduce(large)
        try:
            dist.all_reduce((small, large)[rank])
        except RuntimeError as error:
            assert "disagree" in str(error) and "float32[2]" in str(error) and "float32[3]" in str(error), error
        else:
            raise AssertionError("no error")
    """, TORCH_DISTRIBUTED_DEBUG="DETAIL")


# Where rank VICTIM is struck: os.kill(os.getpid(), HOW) at the marked place.
STRIKE = """
import signal
victim, how = int(os.environ["VICTIM"]), getattr(signal, os.environ["HOW"])
def strike(after=0):
    if rank == victim:
        time.sleep(after)  # until the other rank waits for this one
        os.kill(os.getpid(), how)
"""
PLACES = {
    "load": START + STRIKE + """
state = {"w": torch.randn(64, 64)}
torch.save(state, os.path.join(os.path.dirname(__file__), f"{rank}.pt"))
strike(4)
loaded = torch.load(os.path.join(os.path.dirname(__file__), f"{rank}.pt"), map_location="tpu")
dist.broadcast(loaded["w"], 0); loaded["w"].sum().item()
""",
    "compile": START + STRIKE + """
@torch.compile(backend="tpu")
def f(x):
    dist.all_reduce(x)
    return x + 1
f(torch.ones(3, device="tpu")).tolist()
strike(6)
f(torch.ones(7, device="tpu")).tolist()
""",
    "decode": START + STRIKE + """
@torch.compile(backend="tpu")
def step(x, w):
    y = x @ w
    dist.all_reduce(y)
    return torch.tanh(y)
x, w = torch.ones(1, 16, device="tpu"), torch.eye(16, device="tpu")
for i in range(6):
    if i == 3: strike()
    x = step(x, w); x.sum().item()
""",
    "training": START + STRIKE + """
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2).to("tpu"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i in range(6):
    optimizer.zero_grad(); model(torch.ones(2, 4, device="tpu")).sum().backward()
    if i == 3: strike()
    optimizer.step()
""",
}
KILLED = {"load": ("broadcast from 0(float32[4096])",), "compile": ("all_reduce sum(float32[7])",),
          "decode": ("all_reduce sum(float32[16])",), "training": ("all_reduce sum(float32[10])",)}
FAST = {("decode", 0), ("training", 1)}


@pytest.mark.parametrize(("place", "victim"), [
    pytest.param(place, victim, marks=() if (place, victim) in FAST else pytest.mark.slow)
    for place in PLACES for victim in (0, 1)])
def test_a_rank_that_is_killed(tmp_path, place, victim):
    begin = time.monotonic()
    outcome = launch(tmp_path, PLACES[place], seconds=90, init=False, VICTIM=str(victim), HOW="SIGKILL")
    assert outcome.code != 0 and time.monotonic() - begin < 90 and "FINISHED" not in outcome.output
    for word in (*KILLED[place], f"fails on rank {1 - victim}", "SIGKILL"):
        assert word in outcome.output, (word, outcome.output[-5000:])


@pytest.mark.slow
@pytest.mark.parametrize(("place", "victim"), [("decode", 1), ("training", 0)])
def test_a_rank_that_is_stopped(tmp_path, place, victim):
    """torchrun itself takes 30 s to end a stopped process."""
    outcome = launch(tmp_path, PLACES[place], seconds=120, init=False, VICTIM=str(victim), HOW="SIGSTOP")
    assert outcome.code != 0
    for word in (*KILLED[place], "timed out after 8 s", f"on rank {1 - victim}", f"rank {victim} does not answer"):
        assert word in outcome.output, (word, outcome.output[-5000:])


CASES = {
    "hangs": ("if rank == 1: time.sleep(60)\ndist.all_reduce(x)",
              "all_reduce sum(float32[4])", "timed out after 8 s", "rank 1 does not answer"),
    "raises": ("if rank == 1: raise ValueError('of my own')\ndist.all_reduce(x)",
               "of my own", "all_reduce sum(float32[4])", "rank 1 failed"),
    "ends early": ("if rank == 1: sys.exit(0)\ndist.all_reduce(x)", "all_reduce sum(float32[4])", "rank 1 left"),
}


@pytest.mark.parametrize("case", [pytest.param("hangs", marks=pytest.mark.slow), "raises",
                                  pytest.param("ends early", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come(tmp_path, case):
    body, *words = CASES[case]
    outcome = launch(tmp_path, START + body, seconds=90, init=False)
    assert outcome.code != 0
    for word in words:
        assert word in outcome.output, (word, outcome.output[-5000:])


@pytest.mark.slow
def test_a_rank_that_never_comes_to_init(tmp_path):
    outcome = launch(tmp_path, """
        if rank == 1: time.sleep(40); sys.exit(0)
        dist.init_process_group("tpu", timeout=timedelta(seconds=6))
        torch.ones(2, device="tpu")
    """, seconds=90, init=False)
    assert outcome.code != 0 and "FINISHED" not in outcome.output
    assert "6000ms" in outcome.output or "within 6 s" in outcome.output, outcome.output[-4000:]


def test_nobody_listens_at_the_master_port(tmp_path):
    outcome = launch(tmp_path, """
        os.environ.update(MASTER_PORT="9", TORCHELASTIC_USE_AGENT_STORE="True", RANK="1")
        try:
            dist.init_process_group("tpu", timeout=timedelta(seconds=3))
        except Exception as error:
            print("REFUSED", type(error).__name__, error)
            sys.exit(3)
    """, ranks=1, seconds=60, init=False)
    assert outcome.code != 0 and "REFUSED" in outcome.output and "9" in outcome.output, outcome.output[-3000:]


@pytest.mark.parametrize(("command", "number"), [
    (TORCHRUN, signal.SIGTERM), pytest.param(OURS, signal.SIGINT),
    pytest.param(OURS, signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_ends_all(tmp_path, command, number):
    outcome = launch(tmp_path, START + "print('READY', flush=True)\ntime.sleep(100)\n", seconds=60, init=False,
                     command=command, interrupt=number)
    assert outcome.code != 0 and "FINISHED" not in outcome.output


@pytest.mark.slow
def test_elastic_restart_from_a_checkpoint(tmp_path):
    """Rank 0 is killed once; torchrun starts both again, and training goes on where the checkpoint was."""
    run(tmp_path, """
        where = os.path.join(os.path.dirname(__file__), "checkpoint.pt")
        model = nn.Linear(3, 1, bias=False).to("tpu"); nn.init.ones_(model.weight)
        step = 0
        if os.path.exists(where):
            saved = torch.load(where, map_location="tpu"); model.load_state_dict(saved["model"]); step = saved["step"]
            assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and step == 2, step
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while step < 4:
            optimizer.zero_grad(); model(torch.ones(1, 3, device="tpu")).sum().backward(); optimizer.step(); step += 1
            if rank == 0 and step == 2 and not os.path.exists(where):
                torch.save({"model": model.module.state_dict(), "step": step}, where + ".new")
                os.replace(where + ".new", where)
                os.kill(os.getpid(), 9)
        close(model.module.weight, torch.full((1, 3), 0.6), "after 4 steps")
    """, command=(*TORCHRUN, "--max-restarts=1"), seconds=200)
