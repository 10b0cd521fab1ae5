"""Imports go downward only: docs/architecture.md, as a test."""

import ast
from pathlib import Path

import torch_tpu

ROOT = Path(torch_tpu.__file__).parent
# From the bottom up; folders in one line may not import each other.
LAYERS = [{"runtime"}, {"lowering"}, {"tensor"}, {"eager"}, {"distributed"}, {"mesh"}, {"compile", "custom"},
          {"quantization"},
          {"device"}, {"integrations", "conformance", "aot"}]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imported(path):
    """The folders of torch_tpu that a file imports from."""
    here = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[:len(here) - node.level + 1]
            target = (*base, *(node.module or "").split(".")) if node.module else base
            names = [target] if len(target) > 0 and node.module else [(*base, alias.name) for alias in node.names]
            yield from (name[0] for name in names if name and name[0] in RANK)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_tpu."):
            yield node.module.split(".")[1]


def test_imports_go_downward():
    wrong = sorted({f"{path.relative_to(ROOT)} imports {other}" for folder, rank in RANK.items()
                    for path in (ROOT / folder).rglob("*.py") for other in imported(path)
                    if other != folder and RANK[other] >= rank})
    assert not wrong, "\n".join(wrong)
