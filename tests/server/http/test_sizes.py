"""What clients may store and be sent: bytes of a job, of all jobs of a day, of a page; what ended jobs keep."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from autotuner.database import Database, open_database
from autotuner.database.job_rows import KEPT_BYTES
from autotuner.database.queue import ROW_BYTES
from autotuner.database.tables import JobRow
from autotuner.ir.models import load_model, named_model
from autotuner.plan.request import Request
from autotuner.server.http import Quota, create_app, paging
from autotuner.server.http.jobs import JOB_MAX_BYTES
from tests.server.http.filled import WORKER, XEON

TINY = {"model": "bert-encoder:tiny"}


def large(seed: int = 0, number_of_options: int = 10) -> dict[str, Any]:
    """Return a submission whose model has options that nobody reads, each with 20 kB of texts to choose from."""
    model = load_model("bert-encoder").definition.model_dump(mode="json", exclude_none=True)
    choices = [f"{seed} {letter * 800}" for letter in ascii_lowercase]
    spare = {f"spare_{number}": {"default": choices[0], "choices": choices} for number in range(number_of_options)}
    return {"model": model | {"options": model["options"] | spare}, "preset": "tiny"}


@contextmanager
def serving(database: Database, quota: Quota) -> Iterator[TestClient]:
    app = create_app(database, quota=quota)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield client


@pytest.mark.slow
def test_submitting_and_cancelling_in_turn_fills_no_disk(tmp_path: Path) -> None:
    file = tmp_path / "service.sqlite"
    with open_database(file) as database, serving(database, Quota()) as client:
        sent = len(json.dumps(large()))
        assert 200_000 < sent < JOB_MAX_BYTES
        for number in range(30):
            answer = client.post("/v1/jobs", json=large(number))
            assert answer.status_code == 201, answer.text
            job_id = answer.json()["id"]
            assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 200
            assert database.queue.job(job_id).request == {}
            shown = client.get(f"/v1/jobs/{job_id}").json()
            assert (shown["state"], shown["extents"]["l"], len(shown["family"])) == ("cancelled", 64, 64)
    assert file.stat().st_size < 8 * sent


def test_what_ended_keeps_a_small_request_and_drops_a_large_one(asked: TestClient, database: Database) -> None:
    for body in (TINY, large()):
        answer = asked.post("/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
    with database.locks.hold(WORKER):
        for job in database.queue.claim(WORKER, XEON, limit=2):
            assert Request.from_json(job.request).summary() == job.summary
            before = asked.get(f"/v1/jobs/{job.id}").json()
            database.queue.finish(job.id, 1, "failed", message="x" * 1_000_000)
            after = asked.get(f"/v1/jobs/{job.id}").json()
            changed = {name for name in before if before[name] != after[name]}
            assert changed == {"state", "finished_at", "message", "revision"}
            assert len(after["message"]) < 20_000
    small, dropped = database.queue.job(1).request, database.queue.job(2).request
    assert Request.from_json(small).model == named_model("bert-encoder:tiny")
    assert len(json.dumps(small)) < KEPT_BYTES
    assert dropped == {}


def test_an_idempotency_key_holds_also_for_a_request_that_was_dropped(asked: TestClient) -> None:
    key = {"Idempotency-Key": "a-key"}
    first = asked.post("/v1/jobs", json=large(), headers=key)
    asked.post("/v1/jobs/1/cancel")
    again = asked.post("/v1/jobs", json=large(), headers=key)
    assert (first.status_code, again.status_code, again.json()["id"]) == (201, 200, 1)
    assert asked.post("/v1/jobs", json=large(1), headers=key).status_code == 409


def test_a_client_submits_so_many_bytes_a_day_and_is_told_when_it_may_go_on(database: Database) -> None:
    taken = len(json.dumps(Request(named_model("bert-encoder:tiny")).to_json(), separators=(",", ":")))
    quota = Quota(daily_bytes=3 * (taken + ROW_BYTES))
    with serving(database, quota) as client:
        for number in range(3):
            assert client.post("/v1/jobs", json=TINY).status_code == 201
            client.post(f"/v1/jobs/{number + 1}/cancel")
        began = datetime.now(UTC)
        refused = client.post("/v1/jobs", json=TINY)
        assert refused.status_code == 429
        detail = refused.json()["detail"]
        for told in (3 * (taken + ROW_BYTES), taken, quota.daily_bytes):
            assert str(told) in detail
        free_at = datetime.fromisoformat(detail.rpartition("try again after ")[2])
        assert abs(free_at - began - timedelta(days=1)) < timedelta(minutes=5)
        assert 86_000 < int(refused.headers["Retry-After"]) <= 86_400
        with database._transactions.writing() as connection:
            earlier = datetime.now(UTC) - timedelta(days=1, minutes=1)
            connection.execute(update(JobRow).where(JobRow.id == 1).values(created_at=earlier))
        assert client.post("/v1/jobs", json=TINY).status_code == 201
        assert client.post("/v1/jobs", json=TINY).status_code == 429


def test_one_client_takes_no_bytes_of_another(database: Database) -> None:
    one, other = (database.tokens.create(name, "submitter")[1] for name in ("one", "other"))
    with serving(database, Quota(daily_bytes=10_000)) as client:
        for secret, statuses in ((one, [201, 429]), (other, [201, 429])):
            headers = {"Authorization": f"Bearer {secret}"}
            assert [client.post("/v1/jobs", json=TINY, headers=headers).status_code for _ in range(2)] == statuses


def test_a_job_that_is_too_large_is_refused(asked: TestClient, database: Database) -> None:
    refused = asked.post("/v1/jobs", json=large(0, 20))
    assert refused.status_code == 413, refused.text
    assert f"one may take {JOB_MAX_BYTES}" in refused.json()["detail"]
    assert database.queue.jobs() == []


@pytest.mark.parametrize("where", ["axes", "spec", "option"])
def test_a_text_that_is_too_long_is_refused(asked: TestClient, where: str) -> None:
    body, long = large(0, 0), "x" * 1001
    if where == "axes":
        body["model"]["axes"]["b"] = long
    elif where == "spec":
        body["model"]["operators"][0]["spec"] = long
    else:
        body["model"]["options"]["o"] = {"default": long, "choices": [long]}
    refused = asked.post("/v1/jobs", json=body)
    assert (refused.status_code, "1001 characters: give at most 1000" in refused.text) == (422, True)


def test_a_page_has_so_many_bytes_and_the_next_goes_on(asked: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(12):
        asked.post("/v1/jobs", json=TINY)
    one = len(json.dumps(asked.get("/v1/jobs/1").json(), separators=(",", ":")))
    monkeypatch.setattr(paging, "PAGE_BYTES", 5 * one + one // 2)
    monkeypatch.setattr(paging, "READ_AT_ONCE", 3)
    found, before, sizes = [], "", []
    while before is not None:
        page = asked.get(f"/v1/jobs?limit=12{before and f'&before={before}'}").json()
        sizes.append(len(page["items"]))
        found += [item["id"] for item in page["items"]]
        before = page["next"]
    assert found == list(range(12, 0, -1))
    assert sizes == [5, 5, 2]
    monkeypatch.setattr(paging, "PAGE_BYTES", 1)
    assert len(asked.get("/v1/jobs?limit=12").json()["items"]) == 1
    monkeypatch.setattr(paging, "PAGE_BYTES", 2**22)
    for limit, after in ((4, 9), (12, None), (50, None)):
        page = asked.get(f"/v1/jobs?limit={limit}").json()
        assert (len(page["items"]), page["next"]) == (min(limit, 12), after)


LISTING = """
import resource, sys
from starlette.testclient import TestClient
from autotuner.database import open_database
from autotuner.server.http import create_app
with open_database(sys.argv[1]) as database, TestClient(create_app(database), "http://localhost") as client:
    client.get("/v1/jobs?limit=1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = client.get("/v1/jobs?limit=1000").json()
    print(len(page["items"]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of memory is that of Linux")
def test_listing_large_jobs_that_wait_takes_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "service.sqlite"
    with open_database(file) as database, serving(database, Quota(queued=1000)) as client:
        for number in range(100):
            assert client.post("/v1/jobs", json=large(number)).status_code == 201
    ran = subprocess.run([sys.executable, "-c", LISTING, str(file)], capture_output=True, text=True, check=True)
    number, grown_kib = map(int, ran.stdout.split())
    assert number == 100
    assert grown_kib < 20_000


def test_a_job_of_an_earlier_version_is_listed_from_its_request(
    asked: TestClient, database: Database, make_old: Callable[[], None]
) -> None:
    submitted = asked.post("/v1/jobs", json=TINY).json()
    make_old()
    assert database.queue.job(1).summary is None
    assert asked.get("/v1/jobs/1").json() == asked.get("/v1/jobs").json()["items"][0] == submitted
    assert asked.post("/v1/jobs/1/cancel").json()["family"] == submitted["family"]


@pytest.fixture
def make_old(database: Database) -> Callable[[], None]:
    """Leave the jobs as an earlier version stored them."""

    def make() -> None:
        with database._transactions.writing() as connection:
            connection.execute(update(JobRow).values(summary=None))

    return make


@pytest.mark.usefixtures("filled")
def test_a_page_of_measurements_has_so_many_bytes(asked: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = asked.get("/v1/measurements").json()["items"]
    assert len(everything) == 3
    monkeypatch.setattr(paging, "PAGE_BYTES", 1)
    found, after = [], ""
    while after is not None:
        page = asked.get(f"/v1/measurements?{after and f'after={after}'}").json()
        assert len(page["items"]) == 1
        found += page["items"]
        after = page["next"]
    assert found == everything
