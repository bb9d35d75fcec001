"""Examples in README and docs run, and print what the documents say.

Python blocks of a document share their names, in order; so a later block goes on from an earlier one. All blocks run
in a folder with `tiny.json` and `autotuner.sqlite`, the recorded tuning of bert-encoder:tiny.
"""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotuner.kernels import KERNELS
from scripts.recorded import TINY
from tests.docs.blocks import DOCUMENTS, ROOT, Block, blocks
from tests.docs.conftest import Tuning

WITH_PYTHON = [path for path in DOCUMENTS if blocks(path, "python")]
COMMANDS = [block for path in DOCUMENTS for block in blocks(path, "bash")]
OUTPUTS = [
    ("README.md", "autotuner tune", ["show", "tiny.json"]),
    ("docs/one-operator.md", "linear1\n  linear1 is", ["show", "tiny.json", "--operator", "linear1"]),
    ("docs/tuning.md", "output_projection\n", ["show", "tiny.json", "--operator", "output_projection"]),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", WITH_PYTHON, ids=lambda path: path.name)
def test_python_blocks_run_and_print_what_the_document_says(
    path: Path, tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tuning.folder)
    monkeypatch.syspath_prepend(tuning.folder)
    registered = {kernel.name: kernel for kernel in KERNELS}
    monkeypatch.setattr(KERNELS, "_kernels", registered)  # what a document adds goes with it
    names: dict[str, Any] = {
        "__name__": "document",
        "space": tuning.space,
        "measurements": tuning.measurements,
        "configuration": tuning.configuration,
        "problem": TINY.problem(),
    }
    for block in blocks(path, "python"):
        if not block.reason:
            run(block, names, tuning.folder)


def run(block: Block, names: dict[str, Any], folder: Path) -> None:
    """Run a block: a session is compared with what it prints; one that begins with `# name.py` becomes a file."""
    if ">>> " in block.text:
        told: list[str] = []
        session = doctest.DocTestParser().get_doctest(block.text, names, block.name, str(block.path), block.line)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        assert runner.run(session, out=told.append, clear_globs=False).failed == 0, "".join(told)
        names.update(session.globs)
        return
    file = re.match(r"# (\w+\.py)\n", block.text)
    if file is not None:
        (folder / file[1]).write_text(block.text)
        return
    exec(compile("\n" * block.line + block.text, str(block.path), "exec"), names)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [each for each in COMMANDS if not each.reason], ids=lambda block: block.name)
def test_commands_end_without_an_error(block: Block, tuning: Tuning) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "autotuner", f"{block.name}: only commands of autotuner are run; mark others `text`"
            printed(words[1:], tuning.folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document, begins, words", OUTPUTS, ids=lambda value: str(value)[:24])
def test_output_in_documents_is_what_the_command_prints(
    document: str, begins: str, words: list[str], tuning: Tuning
) -> None:
    (block,) = [each for each in blocks(ROOT / document, "text") if each.text.removeprefix("$ ").startswith(begins)]
    output = printed(words, tuning.folder).splitlines()
    lines = [line for line in block.text.splitlines() if not line.startswith(("$", "...", "Configuration written"))]
    assert [line for line in lines if line not in output] == []


def printed(words: list[str], folder: Path) -> str:
    """Return what a command prints, in a terminal of 100 columns."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "autotuner.cli", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
