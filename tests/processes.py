"""Runs code in a fresh interpreter, for what depends on how and when things are imported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def python(code: str, *options: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished process; its exit code is the caller's to judge."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_TPU_") or k == "TORCH_TPU_CACHE_DIR"}
    return subprocess.run([sys.executable, *options, "-c", textwrap.dedent(code)], capture_output=True, text=True,
                          timeout=timeout, env={**kept, **environment}, check=False)
