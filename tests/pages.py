"""The code blocks of README.md and docs/: what a page says about each of them, and how Python blocks are run.

A block is fenced, and its language is python, bash or text (output, drawings, file listings). A comment on the line
above the fence may say more, in parts that are divided by semicolons:

    <!-- block: slow -->                       minutes rather than seconds: run with -m slow
    <!-- block: alone TORCH_TPU_DEBUG=1 -->    Python in a process of its own, with these variables if there are any
    <!-- block: file train.py -->              not run but written to a file, which other blocks of the page run
    <!-- block: saved as script.py -->         run, and written to a file
    <!-- block: needs libtpu -->               skipped where this module cannot be imported
    <!-- block: not run: REASON -->            for what no test machine has; the test counts these

A comment at the top of a page, <!-- page: NAME=VALUE -->, gives variables for all of its blocks.

Run as a program, `python tests/pages.py PAGE [--slow] [--block LINE]` runs a page's Python blocks one after the other
in one namespace. Tracebacks name the lines of the page.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRANSLATIONS = ("ar", "ja", "pt")
_FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.S | re.M)
_MARK = re.compile(r"<!-- block: ([^\n]*) -->\n\n?\Z")
_PAGE = re.compile(r"^<!-- page: (.*?) -->$", re.M)
_KINDS = ("slow", "alone", "file", "saved as", "needs", "not run:")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its opening fence, `marks` what the comment above it says."""

    page: Path
    line: int
    language: str
    code: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


def pages() -> list[Path]:
    """README.md and every page of docs/ but translations."""
    every = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in every if translated(page) is None)]


def translated(page: Path) -> str | None:
    """The language of a translation (guide.ja.md), None for a page in English."""
    suffix = Path(page.stem).suffix.removeprefix(".")
    return suffix if suffix in TRANSLATIONS else None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order. ValueError for a comment that is not understood."""
    text, found = page.read_text(), []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[:match.start()])
        line = text.count("\n", 0, match.start()) + 1
        marks = _marks(mark[1], page, line) if mark else {}
        found.append(Block(page, line, match["language"].strip(), match["code"], marks))
    return found


def variables(page: Path) -> dict[str, str]:
    """Environment variables that a page asks for."""
    said = _PAGE.search(page.read_text())
    return dict(pair.split("=", 1) for pair in said[1].split()) if said else {}


def outside(page: Path) -> list[str]:
    """The lines of a page that stand in no fenced block, the others empty."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text()).split("\n")


def _marks(said: str, page: Path, line: int) -> dict[str, str]:
    marks = {}
    for part in said.split(";"):
        kind = next((kind for kind in _KINDS if part.strip().startswith(kind)), None)
        if kind is None:
            raise ValueError(f"{page.name}:{line}: {part.strip()!r} is none of {', '.join(_KINDS)}")
        marks[kind.rstrip(":")] = part.strip().removeprefix(kind).strip()
    return marks


def in_page(block: Block, slow: bool) -> bool:
    """Whether a Python block runs in its page's one process."""
    return block.language == "python" and not block.marks.keys() & {"alone", "file", "not run"} and (
        slow or "slow" not in block.marks)


def run(block: Block, names: dict[str, object]) -> None:
    """Executes a Python block; line numbers are those of its page."""
    exec(compile("\n" * block.line + block.code, str(block.page), "exec"), names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--slow", action="store_true", help="also blocks that are marked as slow")
    parser.add_argument("--block", type=int, help="only the block whose fence is on this line")
    given = parser.parse_args()
    sys.path.remove(str(Path(__file__).parent))  # what a page imports comes from where its reader has it
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(given.page):
        if given.block == block.line or (given.block is None and in_page(block, given.slow)):
            print(f"--- {block.name}", flush=True)
            run(block, names)


if __name__ == "__main__":
    main()
