"""What tuning and compiling print: by default, at a terminal and elsewhere, and what silences it."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autotuner
from autotuner.api import telling, tuning
from autotuner.api.progress_lines import ProgressPrinter, gain_of, line_of
from autotuner.database import open_database
from autotuner.plan.configuration import Configuration
from autotuner.plan.phrases import wait
from autotuner.plan.report import render
from autotuner.plan.request import Request
from autotuner.runtime import region
from autotuner.settings import Settings
from autotuner.solve.baselines import alone_as_declared
from autotuner.space import space_file
from autotuner.tuner import Progress, Replay, tune
from tests.made_up import HERE, small_model, space_of, times
from tests.runtime.capture.known import Known, planned
from tests.runtime.capture.test_backend import blocks, inputs

FEW = """
version: 1
device_type: cpu
kernels: {torch_matmul: {layouts: declared}}
conversions: [torch_copy]
"""
DEFAULT_RATIO = re.compile("against the default(<[^>]*>)*[0-9.,]+\u00d7")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let progress be printed, as it is where nobody asks for quiet."""
    for name in ("AUTOTUNER_QUIET", "AUTOTUNER_PROGRESS", "TERM"):
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_what_is_gained_how_far_that_is_proven_and_how_long_it_takes() -> None:
    progress = Progress(
        "measure", 120, 300, measured=120, failed=4, best_us=1000.0, bound_us=800.0, eta_s=260.0, default_us=1320.0
    )
    assert line_of(progress) == (
        "measuring 120 of 300, 120 measured, 4 failed, best 1,000.0 us (1.32x as fast as each operator alone, as "
        "declared), gap 25.0%, 4 min left of this stage"
    )
    assert line_of(replace(progress, left_s=400.0)).endswith("gap 25.0%, 7 min left until the plan is chosen")
    assert [wait(seconds) for seconds in (0.4, 99, 600, 7200)] == ["0 s", "99 s", "10 min", "2.0 h"]


def test_no_gain_is_told_against_times_of_a_busy_device(tmp_path: Path) -> None:
    """A tuning in which one operator alone was timed while the speed of the device changed, once and again."""
    model = small_model(tmp_path)
    space = space_of(model)
    known = times(space.calls)
    alone = alone_as_declared(space, {key: m.median_us or 0.0 for key, m in known.items()})
    known[alone["y"]] = replace(known[alone["y"]], marks=("drifted",))
    seen: list[Progress] = []
    with open_database(tmp_path / "busy.sqlite") as database:
        found = tune(
            Request(model, "cpu"), space_file("cpu", None), database, Replay(HERE, known), watch=seen.append
        ).configuration
    certificate = found.certificate
    assert certificate.default_us is not None
    busy = "(each operator alone was timed on a busy device)"
    assert gain_of(found).startswith(f"{certificate.predicted_us:,.1f} us predicted {busy}")
    (last,) = (line_of(progress) for progress in seen if progress.stage == "solve")
    assert busy in last
    assert not any("as fast as" in text for text in (gain_of(found), *map(line_of, seen)))
    summary = render(found)
    assert "each operator alone was timed on a busy device" in summary
    assert DEFAULT_RATIO.search(summary) is None
    quiet = replace(found, certificate=replace(certificate, default_is_marked=False))
    assert f"({certificate.default_us / certificate.predicted_us:.2f}x as fast as each operator alone" in gain_of(quiet)
    assert DEFAULT_RATIO.search(render(quiet)) is not None
    older = found.to_json()
    del older["certificate"]["default_is_marked"]
    assert Configuration.from_json(older).certificate.default_is_marked is False
    assert Configuration.from_json(found.to_json()) == found


def test_off_a_terminal_there_is_a_line_for_each_stage_and_one_every_ten_seconds() -> None:
    stream, now_s = io.StringIO(), 0.0
    printer = ProgressPrinter(lambda: stream, lambda: now_s)
    printer.begin("region 2 of 5")
    for done in range(120):
        now_s = done / 4
        printer(Progress("measure", done, 120))
        printer(Progress("measure", done, 120, note="waiting for the device"))
    printer(Progress("solve", 0, 0))
    printer(Progress("done", 0, 0))
    assert stream.getvalue().splitlines() == [
        "autotuner: region 2 of 5: measuring 0 of 120",
        "autotuner: region 2 of 5: measuring 0 of 120, waiting for the device",
        "autotuner: region 2 of 5: measuring 40 of 120",
        "autotuner: region 2 of 5: measuring 80 of 120",
        "autotuner: region 2 of 5: solving",
    ]


def test_at_a_terminal_one_line_changes_and_what_was_found_stays() -> None:
    stream, now_s = Terminal(), 0.0
    printer = ProgressPrinter(lambda: stream, lambda: now_s)
    for done in range(3):
        now_s = float(done)
        printer(Progress("measure", done, 3))
    printer.say("found")
    lines = [f"\rautotuner: measuring {done} of 3\x1b[K" for done in range(3)]
    assert stream.getvalue() == "".join(lines) + "\r\x1b[Kautotuner: found\n"


def test_the_line_of_a_tuning_that_ended_early_stays() -> None:
    stream = Terminal()
    printer = ProgressPrinter(lambda: stream)
    printer(Progress("measure", 1, 3))
    printer.begin("")
    printer.say("next")
    assert stream.getvalue() == "\rautotuner: measuring 1 of 3\x1b[K\nautotuner: next\n"


def test_at_a_terminal_that_moves_no_cursor_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    printer = ProgressPrinter(lambda: stream)
    printer(Progress("measure", 0, 3))
    printer(Progress("measure", 1, 3))
    printer(Progress("solve", 0, 0))
    assert stream.getvalue() == "autotuner: measuring 0 of 3\nautotuner: solving\n"


def test_lines_that_are_asked_for_stay_at_a_terminal_as_well() -> None:
    stream = Terminal()
    ProgressPrinter(lambda: stream, changes=False)(Progress("measure", 0, 3))
    assert stream.getvalue() == "autotuner: measuring 0 of 3\n"


def test_a_stream_that_is_closed_ends_no_tuning() -> None:
    stream = io.StringIO()
    stream.close()
    printer = ProgressPrinter(lambda: stream)
    printer(Progress("space", 0, 0))
    printer.say("nobody reads this")


def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, Settings, Any]]:
    """Have tunings answered at once, and return what each was asked."""
    asked: list[tuple[Request, Settings, Any]] = []

    def answer(request: Request, _: Any, file: Any, settings: Settings, *, watch: Any, **__: Any) -> Configuration:
        asked.append((request, settings, file))
        watch(Progress("space", 0, 0))
        watch(Progress("measure", 1, 2, measured=1))
        return planned(request.model)

    monkeypatch.setattr(tuning, "tune_attended", answer)
    return asked


@pytest.mark.slow
def test_tuning_in_python_says_how_far_it_is_and_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    answers(monkeypatch)
    batches = [inputs(2, 3), inputs(2, 5)]
    found = autotuner.tune(blocks(2), batches=batches, database=tmp_path / "known.sqlite")
    told = capsys.readouterr()
    assert told.out == ""
    (first, count, *lines) = told.err.splitlines()
    assert first == "autotuner: reading the model"
    assert count == "autotuner: 2 regions to tune, with 100% of the flop of the model's forward"
    gains = [f"{each.certificate.predicted_us:,.1f} us predicted" for each in found]
    assert [line.split(" (")[0] for line in lines] == [
        f"autotuner: region {number} of 2: {text}"
        for number, gain in enumerate(gains, 1)
        for text in ("enumerating", "measuring 1 of 2, 1 measured", gain)
    ]


@pytest.mark.slow
def test_a_watch_of_ones_own_none_and_a_setting_print_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    answers(monkeypatch)
    seen: list[str] = []
    model, x = blocks(2), [inputs(2, 3)]
    autotuner.tune(model, x, database=tmp_path / "known.sqlite", watch=lambda progress: seen.append(progress.stage))
    assert seen == ["space", "measure"]
    autotuner.tune(model, x, database=tmp_path / "known.sqlite", watch=None)
    monkeypatch.setenv("AUTOTUNER_QUIET", "1")
    autotuner.tune(model, x, database=tmp_path / "known.sqlite")
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_compiling_and_building_kernels_say_so(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Known())
    monkeypatch.setattr(region, "SLOW_S", 0.0)
    model = blocks(2)
    autotuner.optimize(model)(inputs(2, 3)).sum().backward()
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("autotuner: compiling the rest of the model with inductor, once for this shape")
    told = [line.rpartition(" (")[0] for line in lines]
    assert [re.sub(r"\d+ kernels of", "kernels of", line) for line in told] == [
        "autotuner: building kernels of region 1 of 2",
        "autotuner: building kernels of region 2 of 2",
        "autotuner: building kernels for the backward of region 2 of 2",
        "autotuner: building kernels for the backward of region 1 of 2",
    ]
    torch._dynamo.reset()
    autotuner.optimize(model, watch=None)(inputs(2, 3)).sum().backward()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("through", ["optimize", "training_step"])
def test_options_of_tuning_reach_it_through(through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch)
    space = tmp_path / "few.yaml"
    space.write_text(FEW)
    given: dict[str, Any] = {"threads": 1, "space": space, "gap": 0.25, "database": tmp_path / "known.sqlite"}
    model = blocks(2)
    if through == "optimize":
        autotuner.optimize(model, [inputs(2, 3)], device="cpu", watch=None, **given)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        autotuner.training_step(model, optimizer, total, example_inputs=inputs(2, 3), watch=None, **given)
    ((request, settings, file),) = asked
    assert (request.options.gap, settings.threads, list(file.kernels)) == (0.25, 1, ["torch_matmul"])


@pytest.mark.slow
@pytest.mark.parametrize("through", ["optimize", "training_step"])
def test_a_fleet_tunes_what_is_compiled(through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotuner.fleet import tuning as of_fleet

    fleet, asked = of_fleet.Fleet(address="nowhere:1"), []

    def tune_over(over: of_fleet.Fleet, request: Request, *_: Any, **__: Any) -> Configuration:
        asked.append(over)
        return planned(request.model)

    monkeypatch.setattr(of_fleet, "tune_over", tune_over)
    model = blocks(2)
    given: dict[str, Any] = {"fleet": fleet, "database": tmp_path / "known.sqlite", "watch": None}
    if through == "optimize":
        autotuner.optimize(model, [inputs(2, 3)], **given)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        autotuner.training_step(model, optimizer, total, example_inputs=inputs(2, 3), **given)
    assert asked == [fleet]


def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).sum()
    return found


def test_only_the_first_process_of_a_training_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert telling.progress_format() == "auto"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert telling.progress_format() == "none"
    assert "torch" in sys.modules
