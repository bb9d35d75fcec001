"""The live display of a tuning: its rows, its widths, and that nothing of it ends a tuning."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.file_proxy import FileProxy

from autotuner.api import progress_view
from autotuner.api.progress_lines import gain_of
from autotuner.api.progress_view import LiveDisplay, TuningView, live_display, sparks
from autotuner.api.telling import Teller, show
from autotuner.tuner import PlannedCall, Progress
from tests.made_up import made_up_configuration, small_model

NOON = datetime(2026, 11, 27, 12, 0)
CALLS = (
    PlannedCall(("linear1", "linear1_biased", "activation"), "cpp_matmul_bias_gelu_erf", (("a", "blf"),), 300.0, 0.3),
    PlannedCall(("grad_linear1_weight",), "torch_matmul", (("w", "fh#1/3"), ("x", "fh")), 99.94, 0.0999),
    PlannedCall((), "torch_copy", (("hidden", "lbh"),), 12.0, 0.012),
)
MEASURING = Progress(
    "measure", 612, 1117, measured=612, reused=40, failed=17, refused=14, best_us=1000.0, bound_us=800.0,
    estimated_us=990.0, default_us=1320.0, left_s=7200.0, costliest=CALLS,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUTOTUNER_QUIET", "AUTOTUNER_PROGRESS", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@contextmanager
def standard_error(stream: io.StringIO | None = None) -> Iterator[io.StringIO]:
    """Have a terminal as standard error; it is there again when a display has ended."""
    before, sys.stderr = sys.stderr, Terminal() if stream is None else stream
    try:
        given: Any = sys.stderr
        yield given
        assert sys.stderr is given
        assert not progress_view._ONE.locked()
    finally:
        sys.stderr = before


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drawn(view: TuningView, width: int = 80, height: int = 24) -> list[str]:
    console = Console(record=True, force_terminal=True, width=width, height=height, file=io.StringIO())
    console.print(view)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_display_says_stage_calls_plan_gap_costliest_operators_and_expected_end() -> None:
    clock = Clock()
    view = TuningView("bert-encoder:tiny", clock, lambda: NOON)
    assert [line.split() for line in drawn(view)] == [["bert-encoder:tiny", "0:00:00"], ["stage", "starting"]]
    for clock.now_s, best_us in ((40.0, 1400.0), (80.0, 1000.0)):
        view.update(replace(MEASURING, best_us=best_us))
    clock.now_s = 83.0
    assert drawn(view) == [
        "bert-encoder:tiny                                                        0:01:23",
        "stage     5 of 8: measuring ━━━━━━━━╸━━━━━━━ 612 of 1,117",
        "calls     612 measured, 40 reused, 17 failed, of these 14 refused",
        "best plan 1,000.0 us, 1.32x as fast as each operator alone, as declared",
        "gap       25.0% above the proven bound, 800.0 us; 1.0% by estimate",
        "over time 1,400.0            ████████████▁ 1,000.0 us",
        "time left 2.0 h until the plan is chosen, at about 14:00",
        "",
        "the plan's costliest operators  kernel                forms            us  share",
        "linear1 + linear1_biased + ac…  cpp_matmul_bias_gel…  blf             300  30.0%",
        "grad_linear1_weight             torch_matmul          fh             99.9  10.0%",
        "convert hidden                  torch_copy            lbh            12.0   1.2%",
    ]


def test_a_display_without_a_plan_or_a_bound_says_so() -> None:
    view = TuningView("m", Clock())
    view.update(Progress("measure", 0, 9, note="waiting for the device, held by process 17"))
    assert drawn(view)[2:] == [
        "calls     0 measured", "time left not known yet", "waits     waiting for the device, held by process 17",
    ]  # fmt: skip
    view.update(Progress("measure", 9, 9, best_us=5.0, eta_s=30.0))
    assert drawn(view)[3:] == [
        "best plan 5.0 us", "gap       no bound is known yet", "over time 5.0 us, the first plan",
        "time left 30 s of this stage",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 79, 80, 200])
@pytest.mark.parametrize("stage", ["space", "search", "compile", "end_to_end", "done"])
def test_every_row_is_one_line_at_any_width(width: int, stage: str) -> None:
    view = TuningView("a-model-with-a-name-that-is-longer-than-most:and-a-preset-of-thirty" * 2, Clock())
    long = replace(MEASURING, stage=stage, total=123_456, best_us=1_234_567.8, note="waiting " * 30)  # type: ignore[arg-type]
    view.update(long)
    lines = drawn(view, width)
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 1 + 7 + 1 + 1 + len(CALLS)


def test_the_longest_stage_shows_its_counts_in_80_columns() -> None:
    view = TuningView("m", Clock())
    view.update(Progress("search", 1_234, 12_345))
    assert drawn(view)[1].endswith("1,234 of 12,345")


def test_a_low_terminal_has_no_table() -> None:
    view = TuningView("m", Clock())
    view.update(MEASURING)
    assert len(drawn(view, height=12)) == 7


def test_text_from_outside_is_drawn_as_it_is_and_moves_no_cursor() -> None:
    view = TuningView("\x1b[2J[red]x[/x]:smile:", Clock())
    call = PlannedCall(("\x1b[1A",), "k", (("t", "b"),), 1.0, 1.0)
    view.update(replace(MEASURING, note="[/x]\n\x9b", costliest=(call,)))
    text = "\n".join(drawn(view))
    assert "\\x1b[2J[red]x[/x]:smile:" in text
    assert "waits     [/x]\\n\\x9b" in text
    assert "\\x1b[1A" in text


def test_best_times_over_time_are_as_high_as_they_are_long() -> None:
    points = [(2.0, 100.0), (5.0, 50.0), (9.0, 0.0)]
    assert sparks(points, 10.0, 10, "012") == " 222111100"
    assert sparks([(0.0, 7.0)], 1.0, 3, "012") == "000"


def test_an_ascii_terminal_gets_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = TuningView("m", Clock())
    view.update(replace(MEASURING, best_us=1400.0))
    view.update(MEASURING)
    console = Console(file=stream, force_terminal=True, width=80, height=12)
    console.print(view)
    stream.flush()
    raw = stream.buffer.getvalue()
    assert b"612 of 1,117" in raw


# At a terminal


def test_a_tuning_at_a_terminal_is_drawn_in_place_and_leaves_a_line(tmp_path: Path) -> None:
    found = made_up_configuration(small_model(tmp_path))
    with standard_error() as stderr:
        with Teller(show).telling("region 1 of 2") as told:
            assert isinstance(told.watch, LiveDisplay)
            assert isinstance(sys.stderr, FileProxy)
            told.watch(MEASURING)
            print("a warning", file=sys.stderr)
            told.found(found)
        text = stderr.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert "a warning" in text
    assert "5 of 8: measuring" in text
    left, _, line = text.rpartition("\x1b[2K")
    assert line == f"autotuner: region 1 of 2: {gain_of(found)}\n"
    assert "\x1b[?25h" in left


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_terminal_in_order(error: type[BaseException]) -> None:
    def tune() -> None:
        with Teller(show).telling("m") as told:
            told.watch(MEASURING)
            raise error

    with standard_error() as stderr:
        with pytest.raises(error):
            tune()
        text = stderr.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_display_that_fails_ends_no_tuning_and_lines_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_view, "REFRESH_S", 0.001)
    monkeypatch.setattr(progress_view, "calls_of", lambda _: 1 / 0)
    seen: list[Progress] = []
    with standard_error() as stderr:
        display = live_display("m", seen.append)
        assert display is not None
        with display:
            display(MEASURING)
            display._thread.join()
            display(MEASURING)
        text = stderr.getvalue()
    assert seen == [MEASURING]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_terminal_that_is_gone_ends_no_tuning() -> None:
    with standard_error() as stderr, Teller(show).telling("m") as told:
        told.watch(MEASURING)
        stderr.close()
        told.watch(MEASURING)


def test_of_two_tunings_at_once_one_is_drawn() -> None:
    seen: list[Progress] = []
    with standard_error() as stderr:
        first = live_display("first", seen.append)
        assert first is not None
        with first:
            assert live_display("second", seen.append) is None  # what is written goes above the first
            with LiveDisplay(first._console, TuningView("third"), seen.append) as third:
                third(MEASURING)
            first(MEASURING)
        text = stderr.getvalue()
    assert seen == [MEASURING]
    assert "third" not in text


@pytest.mark.parametrize("name, value", [("TERM", "dumb"), ("AUTOTUNER_PROGRESS", "lines")])
def test_no_display_where_the_cursor_cannot_move_or_lines_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with standard_error() as stderr:
        with Teller(show).telling("m") as told:
            told.watch(MEASURING)
        text = stderr.getvalue()
    assert text.startswith("autotuner: m: measuring 612 of 1,117, 612 measured")
    assert "\x1b" not in text


def test_no_display_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with standard_error():
        assert live_display("m", print, forced=True) is None


def test_rich_is_drawn_off_a_terminal_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with standard_error(io.StringIO()) as stderr:
        assert live_display("m", print) is None
        monkeypatch.setenv("AUTOTUNER_PROGRESS", "rich")
        with Teller(show).telling("m") as told:
            assert isinstance(told.watch, LiveDisplay)
        assert "\x1b[?25l" in stderr.getvalue()


def test_without_rich_one_line_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.delitem(sys.modules, "autotuner.api.progress_view")
    with standard_error() as stderr:
        with Teller(show).telling("m") as told:
            told.watch(MEASURING)
        assert stderr.getvalue().startswith("\rautotuner: m: measuring 612 of 1,117, 612 measured")
