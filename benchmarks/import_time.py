"""What the package adds to `import torch`: processes with and without its autoload, in turn, medians and their ratio.

    python benchmarks/import_time.py [RUNS]
"""

import os
import statistics
import subprocess
import sys
import time


def once(autoload: str) -> tuple[float, float]:
    """(wall, CPU) seconds of a process that imports torch."""
    before = os.times()
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True,
                   env=dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload))
    wall = time.perf_counter() - begin
    after = os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    once("1"), once("0")
    with_it, without = zip(*((once("1"), once("0")) for _ in range(runs)))
    for name, column in (("wall", 0), ("cpu", 1)):
        a = statistics.median(r[column] for r in with_it)
        b = statistics.median(r[column] for r in without)
        print(f"{name:5} with torch_tpu {a:.3f} s, without {b:.3f} s, ratio {a / b:.3f}")


if __name__ == "__main__":
    main()
