"""The command line's help: of the program and of every command, as plain text of one width.

See `tests.frozen.golden` for how a golden value is written anew.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frozen.golden import FROZEN

FILE = FROZEN / "help.txt"
PROGRAM = """
import sys
from contextlib import suppress

from autotuner.cli import main

for command in sys.argv[1:]:
    sys.argv = ["autotuner", *command.split(), "--help"]
    with suppress(SystemExit):
        main()
    print(end="\\f", flush=True)
"""
COMMANDS = (
    "", "tune", "solve", "show", "check", "devices", "spaces", "report", "plot", "serve", "worker", "node", "submit",
    "jobs", "cancel", "gpus", "best", "token", "token create", "token list", "token revoke",
    "db", "db upgrade", "db prune", "db export", "db import",
)  # fmt: skip
SETTINGS = ("AUTOTUNER_", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")


def helps(*commands: str) -> list[str]:
    """Return what `autotuner COMMAND --help` prints for each command, without spaces at the ends of lines.

    One process runs them all, which imports half a second once.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    plain = {"COLUMNS": "120", "TERMINAL_WIDTH": "120", "TERM": "dumb", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    asked = [sys.executable, "-c", PROGRAM, *commands]
    ran = subprocess.run(asked, env=kept | plain, capture_output=True, text=True, encoding="utf-8", check=True)
    return [re.sub(r" +$", "", each, flags=re.MULTILINE).strip() for each in ran.stdout.split("\f")[:-1]]


def text() -> str:
    found = zip(COMMANDS, helps(*COMMANDS), strict=True)
    return "\n\n".join(f"$ autotuner {name}{' ' * bool(name)}--help\n{said}" for name, said in found) + "\n"


def write() -> None:
    """Write the golden text anew."""
    Path(FILE).write_text(text(), encoding="utf-8")


@pytest.mark.slow
def test_every_command_has_the_help_it_had() -> None:
    assert text().splitlines() == FILE.read_text(encoding="utf-8").splitlines()


def test_no_command_is_left_out() -> None:
    listed = re.findall(r"^│ (\w+) ", helps("")[0].partition("─ Commands ─")[2], flags=re.MULTILINE)
    assert sorted(listed) == sorted({name.partition(" ")[0] for name in COMMANDS} - {""})
