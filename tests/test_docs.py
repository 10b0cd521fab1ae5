"""The Python in the documentation runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["compile.md"])
def test_code_blocks(page, capsys):
    torch._dynamo.reset()
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    assert blocks
    names: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
    assert capsys.readouterr().out
