"""Every command line of autotuner that a document has, and every option that it names, exists."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from autotuner.cli.program import app
from tests.docs.blocks import DOCUMENTS, blocks
from tests.docs.session import commands

INLINE = re.compile(r"`((?:\.venv/bin/)?autotuner [^`]+)`")
REDIRECTION = re.compile(r" 2?> \S+")
OPTION = re.compile(r"`(--[a-z][a-z-]*)[^`]*`")
OTHERS = {
    "--publish": "docker run", "--no-healthcheck": "docker run", "--build-arg": "docker build", "--block": "ray start",
    "--fast": "scripts/test", "--max-autotune": "scripts/bench_layer_cuda", "--dropout": "scripts/bench_layer",
}  # fmt: skip
"""Options of other programs that the documents name."""


def fenced(path: Path) -> Iterator[str]:
    """Yield the commands of autotuner in the blocks of a document."""
    for block in blocks(path):
        if block.language == "bash":
            yield from commands(block.text)
        if block.language == "console":
            yield from re.findall(r"^\$ (.+)$", block.text, re.MULTILINE)


def lines(path: Path) -> list[str]:
    found = [*fenced(path), *INLINE.findall(re.sub(r"\s*\n\s*", " ", path.read_text()))]
    return [
        line.removeprefix(".venv/bin/") for line in found if line.removeprefix(".venv/bin/").startswith("autotuner ")
    ]


LINES = [(path.name, line) for path in DOCUMENTS for line in dict.fromkeys(lines(path))]


def test_there_are_command_lines() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize(("document", "line"), LINES, ids=str)
def test_every_command_line_is_understood(document: str, line: str) -> None:  # noqa: ARG001
    """Arguments may be missing: a sentence names a command with an option."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(REDIRECTION.sub("", line), comments=True)[1:]
    while hasattr(command, "commands"):
        if not words:
            return
        assert words[0] in command.commands or words[0].startswith("--"), line
        if words[0].startswith("--"):
            break
        command = command.commands[words.pop(0)]
    try:
        command.make_context(command.name, list(words))
    except Exception as error:
        named = type(error).__name__ == "BadOptionUsage" and words[-1] in options(command)
        if not named and type(error).__name__ not in ("MissingParameter", "Exit"):
            raise


def options(command: Any) -> set[str]:
    """Return the options of a command and of all below it."""
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return own.union(*(options(each) for each in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_option_that_is_named_exists(path: Path) -> None:
    known = options(typer.main.get_command(app)) | OTHERS.keys() | {"--help", "--version"}
    assert sorted(set(OPTION.findall(path.read_text())) - known) == []
