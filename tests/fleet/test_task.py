"""A tuning task before it measures, and the options that ask for a fleet."""

from pathlib import Path
from typing import Any

import pytest

from autotuner.cli.fleet import given_fleet
from autotuner.database import open_database
from autotuner.errors import InputError
from autotuner.fleet.roster import Roster
from autotuner.fleet.spec import MeasurerSpec
from autotuner.fleet.task import GpuReport, run_attempt
from autotuner.fleet.tuning import Fleet, window_of
from autotuner.settings import Settings
from tests.fleet.calls import H100, gpu

DEVICE = ("cuda", "NVIDIA H200")


def run(path: Path, job: int, attempt: int) -> str:
    return run_attempt(
        job, attempt, database=f"sqlite:///{path}", space=None, settings=Settings(), fleet=Fleet(),
        log=lambda *_, **__: None,
    )  # fmt: skip


def test_an_attempt_that_is_not_the_latest_does_nothing_and_a_broken_request_fails_its_job(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    with open_database(path) as database, database.locks.hold("runner"):
        database.queue.enqueue(model="m", request={"nothing": 1}, device_type="cuda")
        (first,) = database.queue.claim("runner", [DEVICE])
        database.queue.release(first.id, first.attempt, lost=True)
        (second,) = database.queue.claim("runner", [DEVICE])
        assert run(path, first.id, first.attempt) == "job_lost"
        assert database.queue.job(first.id).state == "running"
        assert run(path, second.id, second.attempt) == "job_failed"
        assert database.queue.job(first.id).state == "failed"
        assert run(path, second.id, second.attempt) == "job_lost"


def test_the_gpus_of_a_job_are_stored_when_they_change_and_those_of_other_jobs_are_not(tmp_path: Path) -> None:
    with open_database(tmp_path / "jobs.sqlite") as database, database.locks.hold("runner"):
        database.queue.enqueue(model="m", request={}, device_type="cuda")
        (job,) = database.queue.claim("runner", [DEVICE])
        report, roster = GpuReport(database, job), Roster()
        report.store()
        assert database.gpus.all() == []
        for each in (gpu(0), gpu(1), gpu(2, H100)):
            roster.join(each)
        roster.lose("two/0", 0.0, "no driver")
        report.tell(roster.shown(0.0))
        report.store()
        shown = [(each.slot, each.device_type, each.device_name, each.used) for each in database.gpus.all()]
        assert shown == [("two/0", "cuda", "", False), ("one/0", *DEVICE, True), ("one/1", *DEVICE, True)]
        told = database.gpus.all()[0].seen_at
        report.store()
        assert database.gpus.all()[0].seen_at == told
        roster.lose("one/1", 0.0, host=True)
        report.tell(roster.shown(0.0))
        report.store()
        assert [each.reason for each in database.gpus.all()][2] == "its host is gone"


def test_a_higher_priority_has_a_wider_window() -> None:
    assert [window_of(priority) for priority in (-5, 0, 1, 2, 3, 100)] == [2, 2, 4, 6, 8, 8]


def test_a_spec_travels_as_text_and_equal_ones_are_one_text() -> None:
    spec = Fleet(arguments={"b": 1, "a": 2}).probe("cuda", Settings(timeout_s=5.0), half_step_bytes=64)
    assert MeasurerSpec.from_text(spec.to_text()) == spec
    assert MeasurerSpec("f", {"a": 1, "b": 2}).to_text() == MeasurerSpec("f", {"b": 2, "a": 1}).to_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "head:6379"}, "it goes with --fleet"),
        ({"fleet": True, "address": "head:6379", "gpus": 2}, "give one of the two"),
        ({"gpus": 2, "device": "cpu"}, "give --device cuda"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    nothing = dict.fromkeys(("address", "gpus", "measurer", "arguments"))
    given: dict[str, Any] = {"fleet": False, "device": "cuda", **nothing}
    with pytest.raises(InputError, match=words):
        given_fleet(**{**given, **options})
    assert given_fleet(**given) is None
    assert given_fleet(**{**given, "gpus": 2}) == Fleet(gpus=2)
