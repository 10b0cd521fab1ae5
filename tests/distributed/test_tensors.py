"""DTensor, tensor and context parallelism, and pipelines on two ranks against one process on the CPU."""

from scripts import run_script


def test_divided_tensors_and_stages_as_one_process(tmp_path):
    output = run_script(tmp_path, "tensor_parallel.py")
    assert "ring_attention" in output and "pipelines" in output
