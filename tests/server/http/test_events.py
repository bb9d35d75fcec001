"""Server-sent events of a job, over a connection."""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import httpx2
import pytest

from autotuner.database import Database, Job
from autotuner.server.http import access, events
from autotuner.server.http.serving import Server
from tests.server.http.filled import HERE, PROGRESS, WORKER, XEON, enqueue
from tests.server.http.listening import PATIENCE_S, listening, wait_until


@pytest.fixture
def served(database: Database) -> Iterator[Server]:
    database.remember(HERE)
    with listening(database) as server:
        yield server


@pytest.fixture
def client(served: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=PATIENCE_S) as opened:
        yield opened


Event = tuple[str, str, int]


def told(lines: Iterator[str]) -> Iterator[Event]:
    """Yield id, name and the job's revision of each event."""
    fields: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and fields:
            yield fields["id"], fields["event"], json.loads(fields["data"])["revision"]
            fields = {}


@pytest.mark.parametrize("state", ["finished", "failed", "cancelled", "interrupted"])
def test_every_change_of_a_job_is_an_event_and_the_last_one_ends_the_stream(
    database: Database, client: httpx2.Client, state: str
) -> None:
    job = enqueue(database)
    with ExitStack() as stack, client.stream("GET", f"/v1/jobs/{job.id}/events") as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        found = told(response.iter_lines())
        assert next(found) == ("1", "progress", 1)
        stack.enter_context(database.locks.hold(WORKER))
        database.queue.claim(WORKER, XEON)
        assert next(found) == ("2", "progress", 2)
        database.queue.report(job.id, 1, progress=PROGRESS)
        assert next(found) == ("3", "progress", 3)
        database.queue.finish(job.id, 1, state)  # type: ignore[arg-type]
        assert list(found) == [("4", state, 4)]


def test_what_a_client_has_is_not_told_again(database: Database, client: httpx2.Client) -> None:
    job = enqueue(database)
    with client.stream("GET", f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "1"}) as response:
        found = told(response.iter_lines())
        database.queue.cancel(job.id)
        assert list(found) == [("2", "cancelled", 2)]
    missed = client.get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "1"})
    assert list(told(missed.iter_lines())) == [("2", "cancelled", 2)]
    assert client.get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "2"}).status_code == 204


@pytest.mark.parametrize("given", ["abc", "-1", "1.5"])
def test_a_last_event_that_is_none_is_refused(database: Database, client: httpx2.Client, given: str) -> None:
    job = enqueue(database)
    response = client.get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": given})
    assert (response.status_code, "last-event-id" in response.json()["detail"]) == (422, True)


def test_a_stream_on_which_nothing_happens_is_kept_alive_by_comments(
    database: Database, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    job = enqueue(database)
    with client.stream("GET", f"/v1/jobs/{job.id}/events") as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line == ": still here")


def test_other_requests_are_answered_while_many_streams_are_open(database: Database, client: httpx2.Client) -> None:
    job = enqueue(database)
    streams = [client.stream("GET", f"/v1/jobs/{job.id}/events") for _ in range(30)]
    found = [told(stream.__enter__().iter_lines()) for stream in streams]
    assert [next(each)[1] for each in found] == ["progress"] * 30
    assert client.post(f"/v1/jobs/{job.id}/cancel").status_code == 200
    assert [next(each)[1] for each in found] == ["cancelled"] * 30
    for stream in streams:
        stream.__exit__(None, None, None)


def counted_looks(database: Database, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Return a semaphore that each look for changes releases."""
    looks, look = threading.Semaphore(0), database.queue.revisions

    def counted(job_ids: Iterable[int]) -> dict[int, tuple[int, bool]]:
        looks.release()
        return look(job_ids)

    monkeypatch.setattr(database.queue, "revisions", counted)
    return looks


def test_one_look_at_a_time_feeds_all_streams_and_without_streams_there_is_none(
    database: Database, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LOOK_S", 0.05)
    looks, jobs = counted_looks(database, monkeypatch), [enqueue(database) for _ in range(4)]
    assert not looks.acquire(timeout=1)
    reads: list[int] = []
    read = database.queue.job

    def noted(job_id: int) -> Job:
        reads.append(job_id)
        return read(job_id)

    with ExitStack() as opened:
        streams = [opened.enter_context(client.stream("GET", f"/v1/jobs/{jobs[n % 4].id}/events")) for n in range(40)]
        found = [told(stream.iter_lines()) for stream in streams]
        assert [next(each)[1] for each in found] == ["progress"] * 40
        monkeypatch.setattr(database.queue, "job", noted)
        before = time.monotonic()
        while looks.acquire(blocking=False):
            pass
        for _ in range(10):
            assert looks.acquire(timeout=PATIENCE_S)
        assert time.monotonic() - before > 8 * events.LOOK_S, "as many looks as streams would take no time"
        database.queue.cancel(jobs[0].id)
        assert [next(each)[1] for each in found[::4]] == ["cancelled"] * 10
        assert reads == [jobs[0].id], "one read for ten streams, none of jobs that have not changed"


def test_streams_are_bounded_and_what_is_above_is_told_to_come_later(
    database: Database, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotuner.server.http.events.streams_max", lambda: 2)
    path = f"/v1/jobs/{enqueue(database).id}/events"
    with client.stream("GET", path) as first, client.stream("GET", path) as second:
        found = [told(stream.iter_lines()) for stream in (first, second)]
        assert [next(each)[1] for each in found] == ["progress"] * 2
        refused = client.get(path)
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        assert "has 2 streams of events" in refused.json()["detail"]

    def opened_again() -> bool:
        with client.stream("GET", path) as again:
            return again.status_code == 200

    wait_until(opened_again)


def test_a_stream_ends_when_its_client_leaves(
    database: Database, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, looks = enqueue(database), counted_looks(database, monkeypatch)
    with client.stream("GET", f"/v1/jobs/{job.id}/events") as response:
        found = told(response.iter_lines())
        next(found)
        for _ in range(3):
            assert looks.acquire(timeout=PATIENCE_S)
    # One look may have begun before the client left; after that there is none.
    while looks.acquire(timeout=5 * events.LOOK_S):
        pass


def test_a_job_that_can_no_longer_be_read_ends_its_stream(
    database: Database, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = enqueue(database)
    with client.stream("GET", f"/v1/jobs/{job.id}/events") as response:
        found = told(response.iter_lines())
        next(found)
        monkeypatch.setattr(database.queue, "revisions", lambda _: database.queue.job(99))
        assert list(found) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_stream_ends_with_its_token_and_says_so(
    database: Database, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for module, name in ((access, "FRESH_S"), (events, "ADMITTED_S")):
        monkeypatch.setattr(module, name, 0.1)
    ends = datetime.now(UTC) + timedelta(seconds=3) if how == "expired" else None
    (token, secret), (_, other) = (
        database.tokens.create("one", "reader", ends),
        database.tokens.create("other", "reader"),
    )
    path = f"/v1/jobs/{enqueue(database).id}/events"
    with ExitStack() as opened:
        one, another = (
            opened.enter_context(client.stream("GET", path, headers={"Authorization": f"Bearer {given}"}))
            for given in (secret, other)
        )
        lines, going_on = one.iter_lines(), told(another.iter_lines())
        assert next(line for line in lines if line == "event: progress")
        assert next(going_on)[1] == "progress"
        if how == "revoked":
            database.tokens.revoke(token.id)
        rest = [line for line in lines if line]  # until the service ends the stream
        assert rest[-1] == f": token {token.id} is {how}: `autotuner token create` makes another"
        database.queue.cancel(1)
        assert not any("cancelled" in line for line in rest)
        assert list(going_on)[-1][1] == "cancelled"


@pytest.mark.slow
def test_a_stream_without_a_token_ends_when_the_first_one_is_made(
    database: Database, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((access, "FRESH_S"), (events, "ADMITTED_S")):
        monkeypatch.setattr(module, name, 0.1)
    with client.stream("GET", f"/v1/jobs/{enqueue(database).id}/events") as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line == "event: progress")
        database.tokens.create("first", "admin")
        assert "this needs a token" in [line for line in lines if line][-1]
