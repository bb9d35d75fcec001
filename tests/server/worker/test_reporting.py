"""The thread that stores a job's progress: nothing that fails there ends it."""

import time
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import Database, open_database
from autotuner.server.worker import reporting
from autotuner.server.worker.reporting import Beat

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
