"""What libtpu finds in a worker's environment, what torchrun finds in the launcher's, and the launcher's arguments."""

import os

import pytest

from torch_tpu import launch
from torch_tpu.distributed import environment
from torch_tpu.runtime import platform, slices

VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE", "MASTER_PORT",
             "TORCH_TPU_HOSTS", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "NODE_RANK",
             "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS",
             "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID", "ALLOW_MULTIPLE_LIBTPU_LOAD",
             "LOCAL_WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")


@pytest.fixture
def clean(monkeypatch):
    """Without any of the variables, before and after."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(("generation", "chips", "box"), [
    ("v4", 1, "1,1,1"), ("v4", 2, "1,2,1"), ("v4", 4, "2,2,1"), ("v5p", 1, "1,1,1"), ("v5p", 2, "1,2,1"),
    ("v5p", 4, "2,2,1"), ("v5e", 1, "1,1,1"), ("v5e", 4, "2,2,1"), ("v5e", 8, "2,4,1"), ("v6e", 1, "1,1,1"),
    ("v6e", 4, "2,2,1"), ("v6e", 8, "2,4,1"), ("v7x", 1, "1,1,1"), ("v7x", 2, "1,2,1"), ("v7x", 4, "2,2,1")])
def test_one_host(generation, chips, box):
    ports = set()
    for rank in range(chips):
        found = slices.worker_environment(rank, rank, chips, chips, generation)
        assert found["TPU_PROCESS_BOUNDS"] == box and found["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
        assert found["TPU_VISIBLE_CHIPS"] == found["TPU_VISIBLE_DEVICES"] == found["CLOUD_TPU_TASK_ID"] == str(rank)
        addresses = found["TPU_PROCESS_ADDRESSES"].split(",")
        assert len(addresses) == chips and addresses[rank] == f"localhost:{found['TPU_PROCESS_PORT']}"
        ports.add(found["TPU_PROCESS_PORT"])
    assert len(ports) == chips


def test_a_subset_of_the_chips(clean):
    """Two jobs on the halves of a host have chips and ports of their own."""
    first = slices.worker_environment(1, 1, 4, 4, "v5e", chips=[0, 1, 2, 3])
    second = slices.worker_environment(1, 1, 4, 4, "v5e", chips=[4, 5, 6, 7])
    assert first["TPU_VISIBLE_CHIPS"] == "1" and second["TPU_VISIBLE_CHIPS"] == "5"
    assert not set(first["TPU_PROCESS_ADDRESSES"].split(",")) & set(second["TPU_PROCESS_ADDRESSES"].split(","))
    with pytest.raises(ValueError, match="names 2 chip"):
        slices.worker_environment(1, 1, 4, 4, "v5e", chips=[4, 5])
    clean.setenv("TPU_VISIBLE_CHIPS", "4,5,6,7")
    clean.setenv("LOCAL_WORLD_SIZE", "4")
    clean.setenv("LOCAL_RANK", "2")
    slices.export(2, 4, "v5e")
    assert os.environ["TPU_VISIBLE_CHIPS"] == "6" and os.environ["TPU_PROCESS_PORT"] == str(slices.PORT + 6)
    clean.setenv("TPU_VISIBLE_CHIPS", "1,1")
    with pytest.raises(ValueError, match="different chip numbers"):
        slices.visible_chips()


def test_two_hosts():
    found = slices.worker_environment(5, 1, 8, 4, "v5p", ["a", "b"])
    assert found["TPU_PROCESS_ADDRESSES"].split(",")[5] == f"b:{found['TPU_PROCESS_PORT']}"
    assert found["TPU_VISIBLE_CHIPS"] == "1" and found["CLOUD_TPU_TASK_ID"] == "5"
    assert found["TPU_PROCESS_BOUNDS"] == "2,4,1"
    with pytest.raises(ValueError, match="2 host"):
        slices.worker_environment(5, 1, 8, 4, "v5p")


def test_a_box_that_does_not_exist():
    with pytest.raises(ValueError, match="no box"):
        slices.bounds("v5e", 3)


def test_launch_arguments():
    assert launch.arguments(["s.py", "--nnodes"], 4) == ["--standalone", "--nproc-per-node=4", "s.py", "--nnodes"]
    assert launch.arguments(["--nnodes=2", "--nproc-per-node=1", "s.py"], 4) == [
        "--nnodes=2", "--nproc-per-node=1", "s.py"]
    apart = ["--nproc-per-node", "2", "--nnodes", "2", "--master-addr", "a", "s.py"]
    assert launch.arguments(apart, 4) == apart
    assert launch.arguments(["-m", "pack.train"], 4, hosts=2) == ["--nproc-per-node=4", "-m", "pack.train"]


def test_launch_environment_checks_its_arguments(clean):
    environment.set_tpu_launch_env(nproc_per_node=2)
    assert os.environ["PET_NPROC_PER_NODE"] == "2" and int(os.environ["OMP_NUM_THREADS"]) >= 1
    assert "PET_NNODES" not in os.environ
    with pytest.raises(ValueError, match="at least 1"):
        environment.set_tpu_launch_env(nproc_per_node=0)
    with pytest.raises(ValueError, match="TPU_WORKER_HOSTNAMES"):
        environment.set_tpu_launch_env(nnodes=2)


def test_launch_environment_of_a_tpu_host(clean):
    clean.setattr(platform, "choose", lambda: platform.Platform("tpu", "8 v5e chips", "v5e", 8))
    for chips in (1, 4, 8):
        environment.set_tpu_launch_env(nproc_per_node=chips)
    for chips, message in ((9, "has 8 v5e"), (3, "no box")):
        with pytest.raises(ValueError, match=message):
            environment.set_tpu_launch_env(nproc_per_node=chips)
    clean.setenv("TPU_VISIBLE_CHIPS", "0,1,2,3")
    with pytest.raises(ValueError, match="4 v5e"):
        environment.set_tpu_launch_env(nproc_per_node=8)


@pytest.mark.parametrize("variable", ["TPU_WORKER_ID", "JOB_COMPLETION_INDEX", "NODE_RANK"])
def test_launch_environment_of_a_cluster(clean, variable):
    clean.setenv("TPU_WORKER_HOSTNAMES", "t-0.svc, t-1.svc")
    clean.setenv(variable, "1")
    for _ in range(2):
        environment.set_tpu_launch_env(nnodes=2, nproc_per_node=4)
        assert {name: os.environ[name] for name in VARIABLES[:5]} == {
            "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "t-0.svc", "PET_MASTER_PORT": "29500",
            "PET_NPROC_PER_NODE": "4"}
        assert os.environ["TORCH_TPU_HOSTS"] == "t-0.svc,t-1.svc"
    from torch.distributed import run

    given = run.get_args_parser().parse_args(launch.arguments(["s.py"], 4, hosts=2))
    assert (given.nnodes, given.node_rank, given.master_addr, given.nproc_per_node) == ("2", 1, "t-0.svc", "4")


def test_a_host_finds_itself_by_its_name(clean):
    clean.setattr(slices.socket, "gethostname", lambda: "t-1")
    assert slices.host_number(["t-0.svc", "t-1.svc"]) == 1
    with pytest.raises(ValueError, match="TPU_WORKER_ID"):
        slices.host_number(["a", "b"])
    clean.setenv("TPU_WORKER_ID", "2")
    with pytest.raises(ValueError, match="no number of one of 2 hosts"):
        slices.host_number(["a", "b"])
