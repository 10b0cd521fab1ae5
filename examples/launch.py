"""Starts generate_tp.py on two chips (or virtual chips): python examples/launch.py"""

from pathlib import Path

import torch
from torch.distributed import run

if __name__ == "__main__":
    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=2)
    script = Path(__file__).with_name("generate_tp.py")
    run.main(["--standalone", "--nproc-per-node=2", str(script)])
