"""Progress as JSON lines: one object a line, with what the tuner did, and a result or a failure at the end."""

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from autotuner.api.progress_json import JsonPrinter
from autotuner.api.telling import Teller, show, teller_of_backend
from autotuner.database import open_database
from autotuner.plan.configuration import Configuration
from autotuner.plan.request import Request
from autotuner.space import space_file
from autotuner.tuner import Progress, Replay, tune
from tests.made_up import HERE, small_model, space_of, times

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNER_QUIET", raising=False)
    monkeypatch.setenv("AUTOTUNER_PROGRESS", "json")


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def tuned(folder: Path, watch: Any) -> Configuration:
    model = small_model(folder)
    with open_database(folder / "known.sqlite") as database:
        measurer = Replay(HERE, times(space_of(model).calls))
        return tune(Request(model, "cpu"), space_file("cpu", None), database, measurer, watch=watch).configuration


def test_lines_tell_what_the_tuner_did_and_end_with_the_result(tmp_path: Path, capsys: Captured) -> None:
    seen: list[Progress] = []
    teller = Teller(show)
    teller.say("reading the model")
    with teller.telling("region 1 of 1") as told:

        def watch(progress: Progress) -> None:
            seen.append(progress)
            told.watch(progress)

        found = tuned(tmp_path, watch)
        told.found(found)
    captured = capsys.readouterr()
    assert captured.out == ""
    note, *lines, result = events(captured.err)
    assert (note["event"], note["text"], note["place"]) == ("note", "reading the model", "")
    assert {line["event"] for line in lines} == {"progress"}
    assert {line["place"] for line in (*lines, result)} == {"region 1 of 1"}
    assert list(dict.fromkeys(line["stage"] for line in lines)) == list(dict.fromkeys(p.stage for p in seen))
    assert (lines[0]["stage"], lines[0]["stage_number"], lines[0]["stages"]) == ("space", 1, 8)
    of_seen = [json.loads(json.dumps(p.to_json())) for p in seen]
    for line in lines:
        assert {name: line[name] for name in of_seen[0]} in of_seen
    assert lines[-1]["stage"] == "done"
    assert [line["time"] for line in (*lines, result)] == sorted(line["time"] for line in (*lines, result))
    certificate = found.certificate
    assert result["event"] == "result"
    assert result["counts"] == found.counts
    assert (result["predicted_us"], result["lower_bound_us"]) == (certificate.predicted_us, certificate.lower_bound_us)
    assert (result["gap"], result["default_us"]) == (certificate.proven_gap, certificate.default_us)
    assert (lines[-1]["measured"], lines[-1]["best_us"]) == (found.counts["measured"], certificate.predicted_us)
    assert lines[-1]["costliest"] == result["costliest"]
    longest = max(found.steps, key=lambda step: step.predicted_us)
    assert result["costliest"][0] == {
        "operators": list(longest.operators), "kernel": longest.kernel,
        "outputs": [list(pair) for pair in longest.outputs], "predicted_us": longest.predicted_us,
        "share": longest.predicted_us / certificate.predicted_us,
    }  # fmt: skip


@pytest.mark.parametrize("error, event", [(ValueError("no"), "failed"), (KeyboardInterrupt("no"), "interrupted")])
def test_what_ends_a_tuning_early_is_told_in_place_of_a_result(
    capsys: Captured, error: BaseException, event: str
) -> None:
    def tune() -> None:
        with Teller(show).telling("m") as told:
            told.watch(Progress("space", 0, 0))
            raise error

    with pytest.raises(type(error)):
        tune()
    last = events(capsys.readouterr().err)[-1]
    assert (last["event"], last["error"], last["text"], last["place"]) == (event, type(error).__name__, "no", "m")


def test_a_stage_has_a_line_a_second_and_one_when_what_is_waited_for_changes() -> None:
    stream, now_s = io.StringIO(), 0.0
    printer = JsonPrinter(lambda: stream, lambda: now_s)
    for done in range(30):
        now_s = done / 10
        printer(Progress("measure", done, 30))
    for note in ("held", "held", ""):
        printer(Progress("measure", 29, 30, note=note))
    told = [(line["done"], line["note"]) for line in events(stream.getvalue())]
    assert told == [(0, ""), (10, ""), (20, ""), (29, "held"), (29, "")]


def test_compiling_is_told_in_notes(capsys: Captured) -> None:
    say = teller_of_backend(False)
    assert say is not None
    say("building kernels")
    (line,) = events(capsys.readouterr().err)
    assert (line["event"], line["text"]) == ("note", "building kernels")


def test_quiet_and_none_and_a_watch_of_ones_own_print_nothing(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(watch: Any) -> str:
        with Teller(watch).telling("m") as telling:
            telling.watch(Progress("space", 0, 0))
        return capsys.readouterr().err

    seen: list[Progress] = []
    assert told(show)
    assert (told(None), told(seen.append), len(seen)) == ("", "", 1)
    monkeypatch.setenv("AUTOTUNER_PROGRESS", "none")
    assert told(show) == ""
    monkeypatch.setenv("AUTOTUNER_PROGRESS", "json")
    monkeypatch.setenv("AUTOTUNER_QUIET", "1")
    assert told(show) == ""


def test_what_cannot_be_written_ends_no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with warnings.catch_warnings(), Teller(show).telling("m") as told:
        told.watch(Progress("space", 0, 0))
        told.found("no configuration")  # type: ignore[arg-type]
