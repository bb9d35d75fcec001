"""A PostgreSQL server that crashes, freezes, or is hidden by a pooler, under those who hold locks and store results."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autotuner.database import Database, backlog, locks, open_database, session_locks
from autotuner.database.retrying import Timeouts
from autotuner.database.session_locks import SessionLock
from autotuner.errors import UnavailableError
from autotuner.ir.records import Call, Environment, Measurement
from tests.postgresql import NoServerError, Server, schema, server

pytestmark = pytest.mark.slow

XEON = [("cpu", "Xeon")]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    """A server of these tests alone."""
    try:
        context = server()
        started = context.__enter__()
    except NoServerError as error:
        pytest.skip(str(error))
    yield started
    context.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOOK_S", 0.1)
    monkeypatch.setattr(session_locks, "LOOKING", Timeouts(answer_s=0.5, locked_s=0.0, away_s=0.0))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def take(database: Database, runner: str) -> int:
    database.queue.enqueue(model="m", request={}, device_type="cpu")
    (job,) = database.queue.claim(runner, XEON)
    return job.id


def test_a_runner_keeps_its_job_over_a_crash_of_the_server(own: Server) -> None:
    events: list[str] = []
    with (
        open_database(own.url, log=lambda event, **_: events.append(event)) as database,
        database.locks.hold("runner") as held,
        open_database(own.url) as another,
        another.locks.hold("another"),
    ):
        job_id = take(database, "runner")
        own.stop(signal.SIGQUIT)
        wait_until(lambda: not held.is_held)
        own.start()
        assert another.queue.claim("another", XEON) == []  # the lock may be free; that it was so for long is not known
        wait_until(lambda: held.is_held)
        assert another.locks.is_held("runner")
        assert another.queue.claim("another", XEON) == []
        assert database.queue.report(job_id, 1) == "go on"
        assert not another.queue.job(job_id).is_lost
        database.queue.finish(job_id, 1, "finished")
    assert held.losses == 1
    assert [event for event in events if event.startswith("lock_")] == [
        "lock_lost",
        "lock_not_taken",
        "lock_taken_again",
    ]


def test_a_lock_is_taken_again_from_a_server_that_froze(own: Server) -> None:
    with open_database(own.url) as database, database.locks.hold("frozen") as held:
        own.tell_all(signal.SIGSTOP)
        try:
            wait_until(lambda: not held.is_held)
        finally:
            own.tell_all(signal.SIGCONT)
        wait_until(lambda: held.is_held)
        assert database.locks.is_held("frozen")


def test_a_pooler_that_hands_a_session_to_others_is_noticed(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, Any]] = []
    real = SessionLock.is_intact

    def elsewhere(self: SessionLock) -> bool:
        if not logged:
            self._backend = -1
        return real(self)

    with (
        open_database(own.url, log=lambda event, **facts: logged.append((event, facts.get("error")))) as database,
        database.locks.hold("pooled") as held,
    ):
        monkeypatch.setattr(SessionLock, "is_intact", elsewhere)
        wait_until(lambda: held.losses == 1)
        wait_until(lambda: held.is_held)
    assert logged[0] == ("lock_pooled", session_locks.POOLED)


def test_two_schemas_of_a_database_have_locks_of_their_own(own: Server) -> None:
    with (
        schema(own.url) as first,
        schema(own.url) as second,
        open_database(first) as one,
        open_database(second) as two,
        one.locks.hold("n"),
    ):
        assert (one.locks.is_held("n"), two.locks.is_held("n")) == (True, False)
        with two.locks.hold("n"):
            assert two.locks.is_held("n")


def test_results_wait_in_memory_while_the_server_is_down(
    own: Server, make_call: Callable[..., Call], environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "PATIENCE_S", 0.1)

    def results(first: int) -> list[tuple[Call, Measurement]]:
        return [(make_call(block), Measurement("ok", float(block))) for block in range(first, first + 5)]

    keys = [make_call(block).key for block in range(20)]
    with schema(own.url) as url, open_database(url, log=lambda *_, **__: None) as database:
        database.remember(environment)
        with database.writing_behind():
            database.store(environment.key, results(0))
            own.stop(signal.SIGQUIT)
            began = time.monotonic()
            for first in (5, 10, 15):
                database.store(environment.key, results(first))
                assert len(database.find(environment.key, keys)) == first  # what was stored before is not reached now
            assert time.monotonic() - began < WAIT_S / 2
            own.start()
        found = database.find(environment.key, keys)
        assert {key: measurement.median_us for key, measurement in found.items()} == {
            key: float(block) for block, key in enumerate(keys)
        }
        assert database.statistics().statuses["ok"] == 20


def test_a_service_refuses_at_once_while_its_server_is_frozen_and_answers_soon_after(own: Server) -> None:
    events: list[str] = []
    serving = Timeouts(answer_s=1.0, locked_s=1.0, away_s=0.0)
    with open_database(own.url, timeouts=serving, log=lambda event, **_: events.append(event)) as database:
        jobs = database.queue.jobs()
        own.tell_all(signal.SIGSTOP)
        try:
            with pytest.raises(UnavailableError):
                database.queue.jobs()
            began = time.monotonic()
            for _ in range(20):
                with pytest.raises(UnavailableError, match="as another request has found"):
                    database.queue.jobs()
            assert time.monotonic() - began < 10.0, "each that asked the server itself would take 1 s"
        finally:
            own.tell_all(signal.SIGCONT)

        def is_back() -> bool:
            try:
                return database.queue.jobs() == jobs
            except UnavailableError:
                return False

        wait_until(is_back)
    assert events[-1] == "database_back"
