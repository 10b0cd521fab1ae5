"""What libtpu finds in a worker's environment, and the launcher's arguments."""

import pytest

from torch_tpu import launch
from torch_tpu.distributed import environment
from torch_tpu.runtime import slices


def test_one_host_of_eight_chips():
    found = slices.worker_environment(3, 3, 8, 8, "v5e")
    assert found["TPU_PROCESS_BOUNDS"] == "2,4,1" and found["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert found["TPU_VISIBLE_CHIPS"] == "3" and found["CLOUD_TPU_TASK_ID"] == "3"
    addresses = found["TPU_PROCESS_ADDRESSES"].split(",")
    assert len(addresses) == 8 and addresses[3] == f"localhost:{found['TPU_PROCESS_PORT']}"


def test_two_hosts():
    found = slices.worker_environment(5, 1, 8, 4, "v5p", ["a", "b"])
    assert found["TPU_PROCESS_ADDRESSES"].split(",")[5] == f"b:{found['TPU_PROCESS_PORT']}"
    with pytest.raises(ValueError, match="2 host"):
        slices.worker_environment(5, 1, 8, 4, "v5p")


def test_a_box_that_does_not_exist():
    with pytest.raises(ValueError, match="no box"):
        slices.bounds("v5e", 3)


def test_launch_arguments():
    assert launch.arguments(["s.py", "--nnodes"], 4) == ["--standalone", "--nproc-per-node=4", "s.py", "--nnodes"]
    assert launch.arguments(["--nnodes=2", "--nproc-per-node=1", "s.py"], 4) == [
        "--nnodes=2", "--nproc-per-node=1", "s.py"]


def test_launch_environment_checks_its_arguments(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment.set_tpu_launch_env(nproc_per_node=2)
    with pytest.raises(ValueError, match="at least 1"):
        environment.set_tpu_launch_env(nproc_per_node=0)
