"""DistributedDataParallel, FSDP2 and checkpoints on two and four ranks against one process on the CPU."""

import pytest
from scripts import run_script


def test_data_parallel_training_as_one_process(tmp_path):
    output = run_script(tmp_path, "data_parallel.py")
    assert "checkpoint" in output and "compiled" in output


@pytest.mark.slow
def test_four_ranks_in_one_and_two_dimensions(tmp_path):
    output = run_script(tmp_path, "data_parallel.py", ranks=4, seconds=400)
    assert "two_dimensions" in output
