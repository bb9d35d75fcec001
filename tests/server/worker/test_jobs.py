"""Jobs from the queue to their end, with a replay in the place of the device."""

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import Database, Filter
from autotuner.errors import DeviceError, InfeasibleError, JobStateError
from autotuner.ir.models import Model
from autotuner.ir.records import Call, Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Overlap
from autotuner.plan.request import Request
from autotuner.server.worker import ahead, attending, loop, reporting, run, tune_attended
from autotuner.settings import Limits, Settings
from autotuner.tuner import Progress
from tests.made_up import CPU, HERE, space_of, times
from tests.server.worker.device import NAME, WORKER, Device, NoProcess, enqueue, run_taken, taken, timed

MADE_UP = Overlap(((1,),), 2.0, 1.0, 3.0)


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_a_job_ends_with_a_configuration_that_is_found_as_the_best(
    small: Model, path: Path, database: Database
) -> None:
    number = enqueue(database, small).id
    run(path, once=True)
    job = database.queue.job(number)
    assert (job.state, job.message, job.worker is not None) == ("finished", "", True)
    assert job.counts["measured"] == len(space_of(small).calls)
    assert job.progress["stage"] == "done"
    assert job.progress["measured"] == job.counts["measured"]
    match = database.configurations.best(
        family_key=small.family,
        dtype=small.dtype,
        extents=small.extents,
        device_type="cpu",
        device_name=HERE.device_name,
    )
    assert match.status == "exact"
    assert match.stored is not None
    assert match.stored.id == job.configuration_id
    assert match.stored.complete
    assert job.progress["best_us"] == match.stored.total_us
    assert database.queue.workers() == []


@pytest.mark.usefixtures("measured")
def test_timing_end_to_end_keeps_what_the_run_found(
    small: Model, path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attending, "_is_timed", lambda _: True)
    monkeypatch.setattr(attending, "time_apart", timed)
    monkeypatch.setattr(ahead, "TimingProcess", NoProcess)
    number = enqueue(database, small).id
    run(path, once=True)
    job = database.queue.job(number)
    assert job.configuration_id is not None
    stored = database.configurations.get(job.configuration_id)
    assert (job.progress["stage"], job.progress["best_us"]) == ("end_to_end", stored.total_us)
    assert job.progress["measured"] == job.counts["measured"] > 0
    assert stored.measured_us == 50.0


@pytest.mark.usefixtures("measured")
def test_a_plan_of_a_region_gets_its_overlap_where_the_device_has_graphs(
    small: Model, path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    name = {"name": "captured-small"}
    region = Model.from_json(small.to_json() | name | {"definition": {**small.definition, **name}})

    def with_overlap(configuration: Configuration, samples: int, *_: Any) -> Configuration:
        asked.append(samples)
        return replace(configuration, overlap=MADE_UP)

    monkeypatch.setattr(attending, "has_graphs", lambda _: True)
    monkeypatch.setattr(attending, "time_apart", with_overlap)
    monkeypatch.setattr(ahead, "TimingProcess", NoProcess)
    numbers = [enqueue(database, region).id, enqueue(database, region).id]
    run(path, once=True)
    found = {database.queue.job(number).configuration_id for number in numbers}
    stored = [database.configurations.get(number).text for number in found if number is not None]
    assert {Configuration.from_json(json.loads(text), "").overlap for text in stored} == {MADE_UP}
    assert asked == [0]


@pytest.mark.usefixtures("measured")
def test_a_second_job_reuses_what_the_first_one_measured(small: Model, path: Path, database: Database) -> None:
    first, second = enqueue(database, small), enqueue(database, small, again=True)
    run(path, once=True)
    calls = len(space_of(small).calls)
    assert database.queue.job(first.id).counts["measured"] == calls
    assert database.queue.job(second.id).counts["measured"] == 0
    assert database.queue.job(second.id).counts["reused"] == calls


@pytest.mark.usefixtures("measured")
def test_limits_of_a_request_reach_the_run(small: Model, path: Path, database: Database) -> None:
    operators = len(space_of(small).graph.operators)
    number = enqueue(database, small, limits=Limits(measurements=operators + 2)).id
    run(path, once=True)
    assert database.queue.job(number).counts["unknown"] > 0


def test_a_job_that_fails_says_why_and_the_worker_goes_on(
    small: Model, path: Path, database: Database, measured: dict[str, Measurement]
) -> None:
    good = dict(measured)
    measured.update({key: Measurement("crashed", message="killed by SIGSEGV") for key in measured})
    logged: list[tuple[str, dict[str, Any]]] = []

    def log(event: str, **facts: Any) -> None:
        logged.append((event, facts))
        if event == "job_failed":
            measured.update(good)

    bad, fine = enqueue(database, small).id, enqueue(database, small, retry=True).id
    run(path, once=True, log=log)
    job = database.queue.job(bad)
    assert job.state == "failed"
    assert "operator 'product' has no candidate that works" in job.message
    assert database.queue.job(fine).state == "finished"
    assert [event for event, _ in logged] == [
        "worker_started", "job_taken", "job_failed", "job_taken", "job_finished", "worker_ended",
    ]  # fmt: skip


@pytest.mark.usefixtures("measured")
def test_a_request_that_cannot_be_read_fails_with_a_sentence(small: Model, path: Path, database: Database) -> None:
    broken = database.queue.enqueue(model="small", request={"model": small.to_json()}, device_type="cpu")
    run(path, once=True)
    job = database.queue.job(broken.id)
    assert (job.state, job.configuration_id) == ("failed", None)
    assert "a request has the keys" in job.message


@pytest.mark.usefixtures("measured")
def test_a_worker_that_cannot_run_anything_takes_no_job(small: Model, path: Path, database: Database) -> None:
    number = enqueue(database, small).id
    with pytest.raises(DeviceError, match="0 threads asked for"):
        run(path, threads=0, once=True)
    assert database.queue.job(number).state == "queued"


def test_what_nobody_expected_fails_the_job_and_not_the_worker(
    small: Model, path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> Device:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(attending, "Measurer", broken)
    monkeypatch.setattr(loop, "Measurer", lambda **_: Device(HERE, {}))
    numbers = [enqueue(database, small).id for _ in range(2)]
    run(path, once=True)
    assert [database.queue.job(number).message for number in numbers] == ["planted", "planted"]


@pytest.mark.usefixtures("measured")
def test_a_cancelled_job_ends_soon_and_keeps_what_was_measured(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "TELL_AFTER_S", 0.0)
    enqueue(database, small)
    job = taken(database)

    def cancel_midway(progress: Progress) -> None:
        if progress.stage == "measure" and progress.done == 20:
            assert database.queue.cancel(job.id).cancelling

    assert run_taken(job, database, cancel_midway) is None
    ended = database.queue.job(job.id)
    assert (ended.state, ended.configuration_id) == ("cancelled", None)
    assert "what was measured is kept" in ended.message
    assert sum(database.statistics(Filter(HERE.key)).statuses.values()) == 20


@pytest.mark.usefixtures("measured")
def test_a_job_in_hand_goes_back_to_the_queue_when_the_worker_is_told_to_end(small: Model, database: Database) -> None:
    enqueue(database, small)
    job = taken(database)

    def end(progress: Progress) -> None:
        if progress.stage == "measure":
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_taken(job, database, end)
    assert (database.queue.job(job.id).state, database.queue.job(job.id).worker) == ("queued", None)
    assert run_taken(taken(database), database) is not None


@pytest.mark.usefixtures("measured")
def test_an_attended_job_that_is_interrupted_stays_so(small: Model, database: Database) -> None:
    def end(progress: Progress) -> None:
        if progress.stage == "measure":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_attended(Request(small), database, CPU, Settings(), watch=end)
    (job,) = database.queue.jobs()
    assert (job.state, job.attended) == ("interrupted", True)
    assert database.queue.claim(WORKER, [("cpu", NAME)]) == []


@pytest.mark.usefixtures("measured")
def test_an_attended_job_that_somebody_cancels_says_so(small: Model, database: Database) -> None:
    def cancel(progress: Progress) -> None:
        if progress.stage == "space":
            database.queue.cancel(database.queue.jobs()[0].id)

    with pytest.raises(JobStateError, match=r"was cancelled; what was measured is kept"):
        tune_attended(Request(small), database, CPU, Settings(), watch=cancel)


def test_an_attended_job_that_fails_is_stored_and_raised(
    small: Model, database: Database, measured: dict[str, Measurement]
) -> None:
    measured.clear()
    with pytest.raises(InfeasibleError, match="not measured"):
        tune_attended(Request(small), database, CPU, Settings())
    assert database.queue.jobs()[0].state == "failed"


@pytest.mark.usefixtures("measured")
def test_a_job_that_another_worker_took_over_is_let_go(
    small: Model, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "TELL_AFTER_S", 0.0)
    enqueue(database, small)
    job = taken(database)

    def lose(progress: Progress) -> None:
        if progress.stage == "measure" and progress.done == 5:
            database.queue.release(job.id, job.attempt)
            assert database.queue.claim("another", [("cpu", NAME)])

    assert run_taken(job, database, lose) is None
    found = database.queue.job(job.id)
    assert (found.state, found.worker) == ("running", "another")


def test_the_beat_hears_a_cancel(small: Model, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is told: the beat alone hears that it was cancelled."""
    monkeypatch.setattr(reporting, "BEAT_S", 0.01)
    monkeypatch.setattr(reporting, "TELL_AFTER_S", 1e9)
    known = times(space_of(small).calls)

    class Waiting(Device):
        def measure(self, races: Iterable[Sequence[Call]]) -> Iterator[tuple[Call, Measurement]]:
            if database.queue.jobs()[0].cancelling:
                heard.wait(60.0)
            yield from super().measure(races)

    heard = threading.Event()
    real = database.queue.report

    def report(*args: Any, **named: Any) -> Any:
        found = real(*args, **named)
        if found == "cancel":
            heard.set()
        return found

    monkeypatch.setattr(database.queue, "report", report)
    monkeypatch.setattr(attending, "Measurer", lambda **_: Waiting(HERE, known))
    enqueue(database, small)
    job = taken(database)

    def cancel(progress: Progress) -> None:
        if progress.stage == "measure" and progress.done == 0:
            database.queue.cancel(job.id)

    assert run_taken(job, database, cancel) is None
    assert heard.is_set()
    assert database.queue.job(job.id).state == "cancelled"
