"""The thread that stores a job's progress: nothing that fails there ends it."""

import time
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import Database, open_database
from autotuner.server.worker import reporting
from autotuner.server.worker.reporting import TRACE_MAX, Beat, Trace
from autotuner.tuner import Progress

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "BEAT_S", 0.02)
    monkeypatch.setattr(reporting, "ALSO_AFTER_S", 0.0)


def heard(beat: Beat, answer: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while beat.heard != answer:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.timeout(120)
def test_a_beat_outlives_an_error_that_is_none_of_the_database(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    def log(event: str, **facts: Any) -> None:
        events.append({"event": event, **facts})

    def also() -> None:
        raise ValueError("no worker greets so")

    with open_database(tmp_path / "jobs.sqlite") as database, database.locks.hold("me"):
        job = begun(database)
        with Beat(database, job, also, log) as beat:
            for number in range(3):
                beat.tell({"stage": "measure", "done": number}, advanced=True)
            beat.flush()
            assert database.queue.job(job.id).progress == {"stage": "measure", "done": 2}
            database.queue.cancel(job.id)
            heard(beat, "cancel")
    told = {"event": "beat_failed", "job": job.id, "error": "ValueError: no worker greets so"}
    assert told in events


def begun(database: Database) -> Any:
    return database.queue.begin(model="m", request={}, device_type="cpu", device_name="Xeon", runner="me")


def test_a_trace_keeps_the_first_and_the_last_of_many_moments() -> None:
    trace = Trace()
    for number in range(5 * TRACE_MAX):
        trace.note(Progress("measure", number, 1000, measured=number, best_us=2.0, bound_us=1.0))
    assert len(trace.points) <= TRACE_MAX
    measured = [point["measured"] for point in trace.points]
    assert (measured[0], measured[-1]) == (0, 5 * TRACE_MAX - 1)
    assert measured == sorted(set(measured))


def test_a_trace_notes_only_what_has_changed_and_goes_on_where_an_attempt_ended() -> None:
    trace = Trace([{"at": "2026-01-01T00:00:00+00:00", "measured": 1}])
    for _ in range(3):
        trace.note(Progress("measure", 1, 2, measured=7, best_us=2.0))
    assert [point["measured"] for point in trace.points] == [1, 7]
    assert trace.points[1]["bound_us"] is None
