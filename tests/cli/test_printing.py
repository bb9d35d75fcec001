"""What people see of values that no command can make here without measuring, and what programs and files get."""

from dataclasses import replace
from functools import partial
from typing import get_args, get_type_hints

import pytest

from autotuner.cli import console, printing, progress
from autotuner.ir.models import Model
from autotuner.ir.records import Doubt
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Measured
from autotuner.plan.phrases import STAGES
from autotuner.solve.problem import Solution
from autotuner.tuner import Progress
from tests.plan.explained import TURNED, explained_configuration

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no cell of a table be folded."""
    monkeypatch.setattr(console.out, "width", 200)


def cells(text: str) -> list[list[str]]:
    """Return the rows of all tables in a text, without their rules."""
    bar = str.maketrans("┃", "│")
    return [[cell.strip() for cell in line.translate(bar).split("│")[1:-1]] for line in text.splitlines()]


def test_every_stage_of_a_run_has_a_word() -> None:
    assert set(STAGES) == set(get_args(get_type_hints(Progress)["stage"]))


def test_off_a_terminal_progress_is_lines_one_for_each_stage_and_then_one_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    now_s = 0.0
    monkeypatch.setattr(progress, "ProgressLines", partial(progress.ProgressLines, lambda: now_s))
    with progress.Shown("auto") as shown:
        shown(Progress("space", 0, 0))
        for done in range(100):
            now_s = done / 10
            shown(Progress("measure", done, 100, measured=done))
        for note in ("waiting for the device, held by process 17", "") * 3:
            shown(Progress("measure", 99, 100, measured=99, note=note))
        shown(Progress("solve", 0, 0, measured=99, best_us=62.5))
    assert capsys.readouterr().err.splitlines() == [
        "enumerating",
        "measuring 0 of 100",
        "measuring 50 of 100, 50 measured",
        "measuring 99 of 100, 99 measured, waiting for the device, held by process 17",
        "solving, 99 measured, best 62.5 us",
    ]


def test_a_doubtful_configuration_says_why_and_what_to_do(found: Configuration, capsys: Captured) -> None:
    doubtful = replace(found, doubts=(Doubt("contended", "7 of 9 times were taken in a bad moment."),))
    for steps in (False, True):
        printing.print_configuration(doubtful, as_json=False, steps=steps)
        text = capsys.readouterr().out
        assert "7 of 9 times were taken in a bad moment." in text
        assert "autotuner tune --remeasure" in text
        assert "by times that are doubtful" in text
    printing.print_configuration(found, as_json=False)
    assert "doubtful" not in capsys.readouterr().out


def test_progress_for_a_program_prints_nothing(capsys: Captured) -> None:
    with progress.Shown("none") as shown:
        shown(Progress("measure", 3, 4))
    assert capsys.readouterr() == ("", "")


def test_an_end_to_end_time_stands_beside_its_peers_and_its_prediction(capsys: Captured) -> None:
    printing.print_measured(Measured(200.0, 20.0, {"eager": 300.0, "compile": 500.0}, 30), 160.0)
    assert [row for row in cells(capsys.readouterr().out) if len(row) == 3][1:] == [
        ["this configuration", "200.0", ""],
        ["kernels and the rest, predicted", "180.0", "0.90x"],
        ["of it, beside the kernels", "20.0", ""],
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
    console.emit({"text": long})
    assert f'"{long}"' in capsys.readouterr().out


def test_what_was_tried_of_sampled_cells_is_shown_where_there_are_some(found: Configuration, capsys: Captured) -> None:
    title = "cells (kernel and forms)"
    printing.print_configuration(replace(found, counts={"cells_enumerated": 7, "cells_sampled": 0}), as_json=False)
    assert title not in capsys.readouterr().out
    counts = {"cells_enumerated": 7, "cells_sampled": 2, "sampled_combinations": 1800, "sampled_tried": 80}
    printing.print_configuration(replace(found, counts=counts), as_json=False)
    assert dict(row for row in cells(capsys.readouterr().out) if len(row) == 2)[title] == (
        "7 enumerated, 2 sampled: 80 of 1,800 tried, the rest unknown"
    )


def test_a_kernel_whose_cells_are_sampled_is_listed_so(capsys: Captured) -> None:
    entry = {"covers": ["softmax"], "layouts": "all", "params": {"block": [1, 2]}, "combinations": 2, "tried": 2}
    printing.print_kernels("cpu", {"kernels": {
        "one": {**entry, "cells": "enumerated"},
        "two": {**entry, "cells": "sampled", "combinations": 1000, "tried": 40},
    }})  # fmt: skip
    shown = {row[0]: row[3] for row in cells(capsys.readouterr().out) if len(row) == 4}
    assert shown["one"] == "block=[1, 2]"
    assert shown["two"] == "block=[1, 2]; sampled: 40 of 1,000"


def test_a_gap_of_nothing_reads_differently_from_one_that_is_not_known(found: Configuration, capsys: Captured) -> None:
    for gap, words in (
        (0.05, "the plan is 5.00% above"),
        (0.0, "no plan takes less"),
        (None, "too much was never measured"),
    ):
        certificate = replace(found.certificate, proven_gap=gap)
        printing.print_configuration(replace(found, certificate=certificate), as_json=False)
        rows = dict(row for row in cells(capsys.readouterr().out) if len(row) == 2)
        assert rows["lower bound, proven"].endswith(f"({words})")
        assert "gap by learned costs, estimated" not in rows


def test_what_could_overtake_is_shown_ten_at_most_with_how_many_there_are(model: Model, capsys: Captured) -> None:
    many = tuple(replace(TURNED, extra_low_us=-number / 10) for number in range(12))
    printing.print_configuration(replace(explained_configuration(model), overtaking=many), as_json=False, steps=True)
    shown = capsys.readouterr().out
    assert "10 of 12, within the intervals" in shown
    assert [row[3] for row in cells(shown) if row[:1] == ["product"] and len(row) == 4][:2] == ["-1.1", "-1.0"]


def test_what_a_solver_counts_under_a_name_of_its_own_is_shown_with_that_name(capsys: Captured) -> None:
    statistics = {"largest_rows": 1200.0, "largest_bytes": 2048.0, "estimated_bytes": 4096.0, "cases": 3.0, "fronts": 7}
    printing.print_solution(Solution({"x": "ab"}, 2.0, 1.0, "exact", statistics), as_json=False)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "exact: 2.0 us, bound 1.0, gap 100.00%",
        "1,200 rows in the largest table, 2.00 KiB for it, 4.00 KiB at most without bounds, estimated, 3 cases, "
        "fronts: 7",
    ]
