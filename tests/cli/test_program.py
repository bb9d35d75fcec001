"""The command line as one program: its help, what it imports, and how it ends."""

import gc
import subprocess
import sys
from importlib.metadata import version

import pytest

from autotuner import cli
from tests.cli.running import Run

COMMANDS = (
    "tune", "solve", "show", "check", "devices", "spaces", "report", "plot", "serve", "worker", "submit", "jobs",
    "cancel", "best",
)  # fmt: skip
SLOW = ("torch", "sqlalchemy", "pydantic", "fastapi", "uvicorn", "httpx2", "numpy")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"autotuner {command}" in ran.out
    assert run(command, "-h").out == ran.out


def test_the_version_is_said(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"autotuner {version('autotuner')}\n", "")


def test_help_lists_the_commands_and_the_exit_codes(run: Run) -> None:
    ran = run("--help")
    assert ran.code == 0
    for command in COMMANDS:
        assert command in ran.out
    for text in (
        "2 bad input",
        "3 no such device",
        "4 database",
        "5 no plan possible",
        "8 no service",
        "130 interrupted",
    ):
        assert text in " ".join(ran.out.split()).replace("│ │", "")


def test_options_explain_themselves(run: Run) -> None:
    shown = run("tune", "--help").out
    for option in ("--extent", "--option", "--dtype", "--database", "--device", "--threads", "--again", "--json"):
        assert option in shown


def test_without_a_command_help_is_shown(run: Run) -> None:
    assert "Usage" in "".join((run().out, run().err))


def test_a_command_that_does_not_exist_ends_with_2(run: Run) -> None:
    ran = run("guess")
    assert (ran.code, ran.out) == (2, "")
    assert "No such command 'guess'" in ran.err


@pytest.mark.slow
def test_the_program_ends_with_one_line_and_its_code() -> None:
    ran = subprocess.run([sys.executable, "-m", "autotuner.cli", "solve", "bert-encoder:nano"], capture_output=True,
                         text=True, check=False)  # fmt: skip
    assert ran.returncode == 2
    assert ran.stdout == ""
    (line,) = ran.stderr.strip().splitlines()
    assert line.startswith("error ModelError: ")


def test_a_command_collects_garbage_rarely(run: Run) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        assert run("--version").code == 0
        assert gc.get_threshold() == cli.RARELY
    finally:
        gc.set_threshold(*before)


def test_help_imports_nothing_slow() -> None:
    program = f"import sys, autotuner, autotuner.cli; sys.exit([n for n in {SLOW} if n in sys.modules] or None)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
