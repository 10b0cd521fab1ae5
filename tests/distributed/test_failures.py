"""A rank that dies, hangs or disagrees ends the job with a message that names it."""

import time

import pytest
from launcher import launch

START = """
dist.init_process_group(timeout=timedelta(seconds=5))
x = torch.ones(4, device="tpu"); dist.all_reduce(x)
"""
CASES = {
    "sizes": ("y = torch.ones(4 + rank, device='tpu'); dist.all_reduce(y)", "float32[4]", "float32[5]"),
    "hangs": ("if rank == 1: time.sleep(60)\ndist.all_reduce(x)", "timed out after 5 s", "rank 1 does not answer"),
    "raises": ("if rank == 1: raise ValueError('of my own')\ndist.all_reduce(x)", "of my own"),
    "killed": ("if rank == 1: os.kill(os.getpid(), 9)\ndist.all_reduce(x)", "SIGKILL"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_job_ends_with_a_message(tmp_path, case):
    body, *words = CASES[case]
    begin = time.monotonic()
    outcome = launch(tmp_path, START + body, seconds=50, init=False)
    assert outcome.code != 0 and time.monotonic() - begin < 45
    for word in words:
        assert word in outcome.output, outcome.output[-5000:]
