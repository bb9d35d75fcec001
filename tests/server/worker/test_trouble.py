"""Jobs whose database is locked, away or gone, and workers that cannot measure."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotuner.database import WORKING, Database, Filter, Job, Timeouts, open_database
from autotuner.errors import DatabaseError, MeasureError, MissingError, UnavailableError
from autotuner.ir.models import Model
from autotuner.ir.records import Measurement
from autotuner.plan.request import Request
from autotuner.server.worker import loop, run, tune_attended
from autotuner.settings import Settings
from autotuner.tuner import Progress, TuningPolicy
from tests.made_up import CPU, HERE, space_of
from tests.server.worker.device import enqueue, run_taken, taken

pytestmark = pytest.mark.slow

STORES_AT_ONCE = TuningPolicy(store_after_results=1)
END_S = 60.0
"""The claim is 10 s; a machine that is busy takes its time to end a process."""


def run_next(database: Database, watch: Any) -> object:
    return run_taken(taken(database), database, watch, policy=STORES_AT_ONCE)


def midway(progress: Progress) -> bool:
    return progress.stage == "measure" and progress.done == 20


@pytest.mark.usefixtures("measured")
def test_a_write_lock_that_outlasts_sqlites_own_wait_ends_no_job(small: Model, path: Path, database: Database) -> None:
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    release = threading.Timer(1.0, other.execute, ["ROLLBACK"])

    def lock(progress: Progress) -> None:
        if midway(progress):
            other.execute("BEGIN IMMEDIATE")
            release.start()

    number = enqueue(database, small).id
    with open_database(path, timeouts=replace(WORKING, busy_s=0.05)) as opened:
        run_next(opened, lock)
    release.join()
    other.close()
    job = database.queue.job(number)
    assert (job.state, job.counts["measured"]) == ("finished", len(space_of(small).calls))
    assert sum(database.statistics(Filter(HERE.key)).statuses.values()) == len(space_of(small).calls)


@pytest.mark.usefixtures("measured")
def test_a_worker_whose_database_stays_away_fails_no_job_and_goes_on_when_it_is_back(
    small: Model, path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Database.store
    failed: list[str] = []

    def away(self: Database, *arguments: Any, **named: Any) -> int:
        if not failed:
            failed.append("once")
            raise UnavailableError(f"database {path} refused: the server closed the connection")
        return store(self, *arguments, **named)

    monkeypatch.setattr(Database, "store", away)
    events: list[str] = []
    number = enqueue(database, small).id
    run(path, once=True, log=lambda event, **_: events.append(event))
    assert events == [
        "worker_started", "job_taken", "job_given_up", "job_taken", "job_finished", "worker_ended",
    ]  # fmt: skip
    assert database.queue.job(number).state == "finished"


@pytest.mark.usefixtures("measured")
def test_no_client_reads_where_the_database_is(
    small: Model, path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise DatabaseError("database postgresql+psycopg://tuner:***@db.internal/tunings refused: no such table")

    monkeypatch.setattr(Database, "store", broken)
    logged: list[dict[str, Any]] = []
    number = enqueue(database, small).id
    run(path, once=True, log=lambda event, **facts: logged.append(facts) if event == "job_failed" else None)
    job = database.queue.job(number)
    assert (job.state, job.message) == (
        "failed",
        "the database could not be used, and the log of who ran the job says why; what was stored is kept",
    )
    assert "db.internal" in logged[0]["error"]


@pytest.mark.usefixtures("measured")
def test_a_tuning_whose_file_is_deleted_says_so_and_what_it_costs(small: Model, path: Path, database: Database) -> None:
    def delete(progress: Progress) -> None:
        if midway(progress):
            path.unlink()

    with pytest.raises(DatabaseError, match="was deleted while it was in use, and what was stored is gone with it"):
        tune_attended(Request(small), database, CPU, Settings(), watch=delete, policy=STORES_AT_ONCE)
    assert not path.exists()


@pytest.mark.usefixtures("measured")
def test_results_that_the_replaced_file_lacks_are_counted(small: Model, path: Path, database: Database) -> None:
    policy = TuningPolicy(store_after_results=1000, store_after_s=1e9)

    def replace(progress: Progress) -> None:
        if midway(progress):
            other = path.with_name("other")
            open_database(other).close()
            other.replace(path)

    with pytest.raises(DatabaseError, match=r"was replaced by .*; 2\d results that were measured are not stored$"):
        tune_attended(Request(small), database, CPU, Settings(), watch=replace, policy=policy)


@pytest.mark.usefixtures("measured")
def test_a_job_that_is_told_to_end_while_its_database_is_locked_ends_soon_and_by_that(
    small: Model, path: Path, database: Database
) -> None:
    other = sqlite3.connect(path, isolation_level=None)

    def end(progress: Progress) -> None:
        if midway(progress):
            other.execute("BEGIN IMMEDIATE")
            raise SystemExit(0)

    enqueue(database, small)
    began = time.monotonic()
    with open_database(path, log=lambda *_, **__: None) as opened, pytest.raises(SystemExit):
        run_next(opened, end)
    assert time.monotonic() - began < END_S
    other.close()


def test_a_database_that_closes_while_the_end_of_an_attended_job_is_stored_keeps_the_answer(
    small: Model, measured: dict[str, Measurement], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_database(path, timeouts=Timeouts(1.0, 0.0, 0.0)) as database:
        finish = database.queue.finish

        def lost(*arguments: Any, **named: Any) -> Job:
            finish(*arguments, **named)
            raise UnavailableError("the connection was lost before the commit was confirmed")

        monkeypatch.setattr(database.queue, "finish", lost)
        found = tune_attended(Request(small), database, CPU, Settings(), policy=STORES_AT_ONCE)
        assert found.counts["measured"] == len(measured)
        assert database.queue.jobs()[0].state == "finished"


@pytest.mark.usefixtures("measured")
def test_a_worker_goes_on_with_a_file_that_has_taken_the_place_of_a_deleted_one(
    small: Model, path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Database.store

    def replaced(self: Database, *arguments: Any, **named: Any) -> int:
        monkeypatch.setattr(Database, "store", store)
        path.unlink()
        with open_database(path) as anew:
            enqueue(anew, small)
        return store(self, *arguments, **named)

    monkeypatch.setattr(Database, "store", replaced)
    monkeypatch.setattr(loop, "BROKEN_S", 0.01)
    events: list[str] = []
    enqueue(database, small)
    run(path, once=True, log=lambda event, **_: events.append(event))
    for event in ("job_failed", "database_failed", "job_finished"):
        assert event in events
    with open_database(path) as anew:
        assert [job.state for job in anew.queue.jobs()] == ["finished"]


# Processes


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "autotuner.cli", *arguments]
    here = os.environ | {"AUTOTUNER_DATABASE": str(folder / "jobs.sqlite"), "AUTOTUNER_CACHE": str(folder / "cache")}
    return subprocess.Popen(command, env=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def read_until(process: subprocess.Popen[str], *events: str) -> None:
    missing = set(events)
    assert process.stderr is not None
    while missing:
        line = process.stderr.readline()
        assert line, f"it ended without {missing}"
        missing -= {event for event in missing if f" {event}" in line}


def test_a_service_and_its_worker_end_soon_though_their_database_is_locked(tmp_path: Path, path: Path) -> None:
    open_database(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    process = started(tmp_path, "serve", "--with-worker", "--port", "0")
    try:
        read_until(process, "worker_started", "serving")
        other.execute("BEGIN IMMEDIATE")
        read_until(process, "database_waited_for")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=2 * END_S)
        assert time.monotonic() - began < END_S
        assert " worker_ended" in log, "it ended by itself"
    finally:
        process.kill()
        other.close()


# Workers that cannot measure


def test_a_worker_without_torch_refuses_to_start_and_takes_no_job(
    small: Model, path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = enqueue(database, small).id
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingError, match=r"a worker needs torch, which is not installed: install"):
        run(path, once=True)
    assert database.queue.job(number).state == "queued"
    assert database.queue.workers() == []


def test_a_worker_whose_torch_is_broken_refuses_to_start_and_takes_no_job(
    small: Model, path: Path, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = enqueue(database, small).id
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('libgomp is missing')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    with pytest.raises(MeasureError, match=r"the measuring process did not start: .*libgomp is missing"):
        run(path, once=True)
    assert database.queue.job(number).state == "queued"
