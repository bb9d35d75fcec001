"""What people see of values that no command can make here without measuring, and what programs and files get."""

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from autotuner.cli import printing
from autotuner.configuration import Configuration, Measured
from autotuner.errors import InputError
from autotuner.tuner import Progress

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no cell of a table be folded."""
    monkeypatch.setenv("COLUMNS", "200")


def cells(text: str) -> list[list[str]]:
    """Return the rows of all tables in a text, without their rules."""
    bar = str.maketrans("┃", "│")
    return [[cell.strip() for cell in line.translate(bar).split("│")[1:-1]] for line in text.splitlines()]


def test_every_stage_of_a_walk_has_a_word() -> None:
    assert set(printing.STAGES) == set(get_args(get_type_hints(Progress)["stage"]))


def test_progress_shows_each_stage_once_with_what_was_reused_and_failed() -> None:
    shown = printing.Shown(quiet=True)
    shown(Progress("space", 0, 0))
    shown(Progress("measure", 1, 4))
    shown(Progress("measure", 3, 4, reused=2, failed=1))
    bars = [(b.description, b.completed, b.total, b.fields["note"]) for b in shown.bars.tasks]
    assert bars == [("enumerating", 1, 1, ""), ("measuring", 3, 4, "2 reused, 1 failed")]


def test_progress_for_a_program_prints_nothing(capsys: Captured) -> None:
    with printing.Shown(quiet=True) as shown:
        shown(Progress("measure", 3, 4))
    assert capsys.readouterr() == ("", "")


def test_an_end_to_end_time_stands_beside_its_peers_and_its_prediction(capsys: Captured) -> None:
    printing.print_measured(Measured(200.0, 20.0, {"eager": 300.0, "compile": 500.0}, 30), 160.0)
    assert [row for row in cells(capsys.readouterr().out) if len(row) == 3][1:] == [
        ["this configuration", "200.0", "predicted -10.0%"],
        ["of it beside kernels", "20.0", ""],
        ["eager", "300.0", "1.50x"],
        ["compile", "500.0", "2.50x"],
    ]


def test_the_longest_kernels_come_first_and_are_twelve_at_most(found: Configuration, capsys: Captured) -> None:
    printing.print_configuration(replace(found, steps=found.steps * 3), as_json=False)
    shown = capsys.readouterr().out
    assert f"the 12 longest of {3 * len(found.steps)} chosen kernels" in shown
    times_us = [float(row[3]) for row in cells(shown) if len(row) == 5 and row[0] != "computes"]
    assert len(times_us) == 12
    assert times_us == sorted(times_us, reverse=True)
    assert "could be one kernel" not in shown


def test_every_kernel_and_every_fused_set_is_shown_where_steps_are_asked_for(
    found: Configuration, capsys: Captured
) -> None:
    printing.print_configuration(found, as_json=False, steps=True)
    rows = [row for row in cells(capsys.readouterr().out) if len(row) == 5]
    assert len(rows) == 2 + len(found.steps) + len(found.fusions)
    assert {row[4] for row in rows[-len(found.fusions) :]} <= {"chosen", "rejected"}


def test_json_for_programs_is_neither_wrapped_nor_coloured(capsys: Captured) -> None:
    long = "[bold]" + "a " * 300
    printing.emit({"text": long})
    assert f'"{long}"' in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "problem.json"
    with pytest.raises(InputError, match=r"missing/problem\.json: cannot be written \(No such file or directory\)"):
        printing.write(path, "{}")
