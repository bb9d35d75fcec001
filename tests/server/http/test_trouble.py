"""A service whose database hangs, is locked, or is gone."""

import json
import sqlite3
import threading
import time
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from autotuner.database import Database, Timeouts, open_database
from autotuner.database.engine import GRACE_S
from autotuner.server.http import create_app
from tests.server.http.filled import HERE, WORKER, XEON, enqueue
from tests.server.http.listening import PATIENCE_S, listening
from tests.silent import on, silent

pytestmark = pytest.mark.slow

HASTY = Timeouts(answer_s=1.0, locked_s=1.0, away_s=0.0)
ANSWER_S = 0.4
SUBMISSION = {"model": "bert-encoder:tiny"}


def is_problem(response: httpx2.Response) -> bool:
    told = response.text
    return (
        response.status_code == 503
        and response.headers["Content-Type"] == "application/problem+json"
        and "Retry-After" in response.headers
        and not any(secret in told for secret in ("postgresql", "127.0.0.1", "tuner", "secret"))
    )


@pytest.mark.slow
def test_a_server_that_hangs_leads_to_503_and_not_to_requests_that_hang() -> None:
    with (
        silent(welcomes=True) as url,
        on(url, Timeouts(answer_s=ANSWER_S, locked_s=1.0, away_s=0.0)) as database,
        listening(database) as server,
        httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        began = time.monotonic()
        assert is_problem(client.get("/healthz"))
        found: list[bool] = []

        def ask() -> None:
            found.extend(is_problem(client.get(path)) for path in ("/healthz", "/v1/jobs", "/v1/jobs/1/events"))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert found == [True] * 18
        assert time.monotonic() - began < 15 * (ANSWER_S + GRACE_S), "19 requests after one another would take longer"


def test_a_job_is_refused_while_the_database_is_locked_and_what_is_read_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "locked.sqlite"
    with (
        open_database(file, timeouts=HASTY) as database,
        TestClient(create_app(database), base_url="http://127.0.0.1") as client,
    ):
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert is_problem(client.post("/v1/jobs", json=SUBMISSION))
        assert client.get("/v1/jobs").json() == {"items": [], "next": None}
        other.execute("ROLLBACK")
        other.close()
        assert client.post("/v1/jobs", json=SUBMISSION).status_code == 201


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "served.sqlite"


def test_no_job_is_taken_into_a_file_that_was_deleted(file: Path) -> None:
    with (
        open_database(file, timeouts=HASTY, reopens=True) as database,
        TestClient(create_app(database), base_url="http://127.0.0.1") as client,
    ):
        enqueue(database)
        file.unlink()
        for _ in range(2):
            assert is_problem(client.post("/v1/jobs", json=SUBMISSION))
            assert is_problem(client.get("/healthz"))
        assert not file.exists()


def test_a_job_is_kept_in_the_file_that_has_taken_the_place_of_a_deleted_one(file: Path) -> None:
    with (
        open_database(file, timeouts=HASTY, reopens=True) as database,
        TestClient(create_app(database), base_url="http://127.0.0.1") as client,
    ):
        enqueue(database)
        file.unlink()
        with open_database(file) as anew:
            assert client.post("/v1/jobs", json=SUBMISSION).status_code == 201
            assert [job.id for job in anew.queue.jobs()] == [1]


def test_a_service_that_is_told_to_end_does_not_wait_for_its_database() -> None:
    with silent(welcomes=True) as url, on(url, Timeouts(answer_s=PATIENCE_S, locked_s=0.0, away_s=0.0)) as database:
        with (
            listening(database, ending=database.hurry) as server,
            httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        ):
            found: list[bool] = []
            thread = threading.Thread(target=lambda: found.append(is_problem(client.get("/healthz"))))
            thread.start()
            time.sleep(0.5)
            began = time.monotonic()
            server.should_exit = True
            thread.join(PATIENCE_S)
        assert found == [True]
        assert time.monotonic() - began < PATIENCE_S / 2


# A worker that is gone


def claim(database: Database, job_id: int, worker: str = WORKER) -> None:
    (found,) = database.queue.claim(worker, XEON)
    assert found.id == job_id


def test_a_job_whose_only_worker_died_says_so(asked: TestClient, database: Database) -> None:
    job_id = enqueue(database).id
    with database.locks.hold(WORKER):
        claim(database, job_id)
        assert asked.get(f"/v1/jobs/{job_id}").json()["stalled"] == ""
    sentence = "its worker is gone; the next one for cpu goes on from what was measured"
    for found in (asked.get(f"/v1/jobs/{job_id}").json(), asked.get("/v1/jobs").json()["items"][0]):
        assert (found["state"], found["stalled"]) == ("running", sentence)


def test_a_tuning_that_was_killed_says_so(asked: TestClient, database: Database) -> None:
    job = enqueue(database)
    begun = database.queue.begin(
        model=job.model, request=job.request, device_type="cpu", device_name=HERE.device_name, runner=WORKER
    )
    assert asked.get(f"/v1/jobs/{begun.id}").json()["stalled"] == (
        "the process that ran it is gone; what it measured is kept, the same command goes on from there"
    )


def test_a_worker_that_dies_is_an_event_and_so_is_the_next_one(database: Database) -> None:
    job_id = enqueue(database).id
    with listening(database) as server, httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        with database.locks.hold(WORKER):
            claim(database, job_id)
            response = client.send(client.build_request("GET", f"/v1/jobs/{job_id}/events"), stream=True)
            lines = (line for line in response.iter_lines() if line.startswith("data: "))

            def stalled() -> bool:
                return bool(json.loads(next(lines).removeprefix("data: "))["stalled"])

            assert not stalled()
        assert stalled()
        with database.locks.hold("the next"):
            claim(database, job_id, "the next")
            assert not stalled()
        response.close()
