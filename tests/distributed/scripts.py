"""Runs a script of this folder under torchrun."""

import os
from pathlib import Path

from launcher import run

FOLDER = Path(__file__).parent


def run_script(folder: Path, name: str, ranks: int = 2, seconds: float = 300) -> str:
    """The output of a script that must finish on all ranks; it may import its neighbours."""
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    script = "import os\n" + (FOLDER / name).read_text()  # for the launcher's last line
    return run(folder, script, ranks, seconds, init=False, PYTHONPATH=path)
