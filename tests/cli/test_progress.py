"""Progress of `autotuner tune` as a user sees it: at a pseudo-terminal, in a pipe, and for a program."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotuner.errors import InfeasibleError
from autotuner.ir.models import Model, search_spaces_dir
from autotuner.plan.configuration import Configuration
from autotuner.settings import Settings
from autotuner.tuner import Progress
from tests.cli.running import Run

PROGRAM = "import sys; sys.argv[0] = 'autotuner'; from autotuner.cli import main; main()"
SMALL = ("b=2", "l=8", "h=32", "n=2", "p=16", "f=64")
ROWS, COLUMNS = 24, 80
SETTINGS = ("AUTOTUNER_QUIET", "AUTOTUNER_PROGRESS", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
LINES = ["enumerating", "measuring 1 of 2, 1 measured, best 5.0 us, gap 25.0%"]
SAID = Progress("measure", 1, 2, measured=1, best_us=5.0, bound_us=4.0)


@pytest.fixture
def answered(found: Configuration, monkeypatch: pytest.MonkeyPatch) -> Configuration:
    """Have a tuning answered at once, after it has told of its progress; return the answer."""
    monkeypatch.delenv("AUTOTUNER_QUIET", raising=False)

    def tune(_: Model, *, watch: Any, **__: Any) -> Configuration:
        watch(Progress("space", 0, 0))
        watch(SAID)
        return found

    monkeypatch.setattr("autotuner.api.tuning.tune", tune)
    return found


def test_lines_for_a_program_are_json_and_the_last_one_is_the_result(run: Run, answered: Configuration) -> None:
    ran = run("tune", "bert-encoder:tiny", "--progress", "json", "--json")
    first, second, result = map(json.loads, ran.err.splitlines())
    assert (first["event"], first["stage"], first["place"]) == ("progress", "space", "bert-encoder:tiny")
    assert {name: second[name] for name in SAID.to_json()} == json.loads(json.dumps(SAID.to_json()))
    assert (result["event"], result["predicted_us"]) == ("result", answered.certificate.predicted_us)
    assert ran.json == answered.to_json()


@pytest.mark.parametrize(
    "arguments, variables, printed",
    [
        ((), {}, LINES),
        (("--progress", "lines", "--json"), {}, LINES),
        (("--progress", "none"), {}, []),
        (("--json",), {}, []),
        ((), {"AUTOTUNER_QUIET": "1"}, []),
        ((), {"AUTOTUNER_PROGRESS": "none"}, []),
        (("--progress", "auto"), {"AUTOTUNER_QUIET": "1"}, LINES),
    ],
)
@pytest.mark.usefixtures("answered")
def test_an_option_counts_before_the_settings(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], variables: Mapping[str, str],
    printed: list[str],
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run("tune", "bert-encoder:tiny", *arguments).err.splitlines() == printed


def test_another_format_is_refused(run: Run) -> None:
    ran = run("tune", "bert-encoder:tiny", "--progress", "bars")
    assert (ran.code, Settings().progress) == (2, "auto")
    assert "--progress is 'bars': write auto, rich, lines, json or none" in ran.err


def test_for_a_program_errors_warnings_and_interrupts_are_lines_of_json_as_well(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: BaseException) -> None:
        def tune(*_: Any, **__: Any) -> None:
            warnings.warn(f"doubtful: {type(error).__name__}", stacklevel=1)
            raise error

        monkeypatch.setattr("autotuner.api.tuning.tune", tune)

    failing(InfeasibleError("no plan"))
    ran = run("tune", "bert-encoder:tiny", "--progress", "json")
    warning, failed = map(json.loads, ran.err.splitlines())
    assert (ran.code, warning["event"], warning["text"]) == (5, "warning", "doubtful: InfeasibleError")
    assert (failed["event"], failed["error"], failed["text"]) == ("failed", "InfeasibleError", "no plan")
    failing(KeyboardInterrupt())
    ran = run("tune", "bert-encoder:tiny", "--progress", "json")
    _, interrupted = map(json.loads, ran.err.splitlines())
    assert (ran.code, interrupted["event"]) == (130, "interrupted")
    assert "what was measured is kept" in interrupted["text"]


# As a user runs it


def at_a_terminal(
    folder: Path, *arguments: str, interrupted_at: str | None = None, **variables: str
) -> tuple[int, str]:
    """Run a command at a pseudo-terminal of 80 columns; return its exit code and what it wrote there.

    Args:
        interrupted_at: it is interrupted once it has written this.
    """
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment = kept | {"TERM": "xterm-256color", "AUTOTUNER_DATABASE": str(folder / "known.sqlite")} | variables
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=folder, env=environment, stdin=theirs, stdout=theirs,
        stderr=theirs,
        # A shell that runs tests in the background has them ignore interrupts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
        if interrupted_at is not None and interrupted_at.encode() in written:
            process.send_signal(signal.SIGINT)
            interrupted_at = None
    os.close(ours)
    return process.wait(), written.decode()


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A tuning of some seconds: kernels that need no compiler, in declared layouts."""
    space = yaml.safe_load((search_spaces_dir() / "kernels" / "cpu.yaml").read_text())
    space["kernels"] = {name: {"layouts": "declared"} for name in space["kernels"] if name.startswith("torch_")}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    extents = [word for extent in SMALL for word in ("--extent", extent)]
    limits = ["--max-measurements", "5", "--no-end-to-end", "--threads", "1"]
    return ["tune", "bert-encoder:tiny", *extents, "--space", "space.yaml", *limits]


@pytest.mark.slow
def test_at_a_terminal_of_80_columns_tuning_is_drawn_in_place(command: list[str], tmp_path: Path) -> None:
    code, written = at_a_terminal(tmp_path, *command)
    assert code == 0, written
    frames = written.split("\x1b[?25l")[1].split("\x1b[?25h")[0].split("\r\x1b[2K")
    assert len(frames) > 1
    for wanted in (" of 8: ", "done", " measured", "best plan", "proven bound", "costliest operators"):
        assert wanted in written, wanted
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    assert "predicted, kernels of one training" in written.rpartition("\x1b[?25h")[2]


@pytest.mark.slow
def test_an_interrupt_leaves_the_terminal_in_order(command: list[str], tmp_path: Path) -> None:
    code, written = at_a_terminal(tmp_path, *command, interrupted_at=" of 8: ")
    assert code == 130, written
    after = written.rpartition("\x1b[?25h")[2]
    said = "interrupted; what was measured is kept, the same command goes on from there"
    assert " ".join(after.split()) == said
    assert "ended early" in written


@pytest.mark.slow
def test_at_a_dumb_terminal_tuning_prints_lines(command: list[str], tmp_path: Path) -> None:
    code, written = at_a_terminal(tmp_path, *command, TERM="dumb")
    assert code == 0, written
    assert written.startswith("enumerating\r\n")
    assert "\x1b" not in written
