"""Results that wait in memory while an SQLite file is locked or gone; what works on goes on, and nothing is lost."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotuner.database import WORKING, Database, Timeouts, backlog, open_database
from autotuner.errors import DatabaseError, UnavailableError
from autotuner.ir.records import Call, Environment, Measurement

MakeCall = Callable[..., Call]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "PATIENCE_S", 0.1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a database that answers takes more than a second at times."""
    monkeypatch.setattr(backlog, "PATIENCE_S", 60.0)


@pytest.fixture
def file(tmp_path: Path, environment: Environment) -> Path:
    path = tmp_path / "timings.sqlite"
    with open_database(path) as database:
        database.remember(environment)
    return path


@pytest.fixture
def other(file: Path) -> Iterator[sqlite3.Connection]:
    """Another process that may lock the file."""
    connection = sqlite3.connect(file, isolation_level=None)
    yield connection
    connection.close()


def opened(file: Path, locked_s: float = 60.0) -> Database:
    timeouts = replace(WORKING, locked_s=locked_s, busy_s=0.02)
    return open_database(file, timeouts=timeouts, log=lambda *_, **__: None)


def store(database: Database, environment: Environment, call: Call, us: float = 1.0) -> None:
    database.store(environment.key, [(call, Measurement("ok", us))])


@pytest.mark.usefixtures("patient")
def test_results_are_stored_at_once_where_the_database_answers(
    file: Path, environment: Environment, make_call: MakeCall
) -> None:
    with opened(file) as database, opened(file) as second, database.writing_behind():
        for block in range(5):
            store(database, environment, make_call(block))
            assert len(second.measurements()) == block + 1


@pytest.mark.usefixtures("hasty")
def test_work_goes_on_while_the_database_is_locked_and_all_is_stored_after(
    file: Path, other: sqlite3.Connection, environment: Environment, make_call: MakeCall
) -> None:
    keys = [make_call(block).key for block in range(10)]
    with opened(file) as database:
        with database.writing_behind():
            other.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            for block in range(10):
                store(database, environment, make_call(block), float(block))
                assert len(database.find(environment.key, keys)) == block + 1
            assert time.monotonic() - began < 30.0, "each that waited for the lock would take a minute"
            with opened(file) as second:
                assert second.measurements() == []
            other.execute("ROLLBACK")
        found = database.find(environment.key, keys)
    assert [found[key].median_us for key in keys] == [float(block) for block in range(10)]


@pytest.mark.usefixtures("hasty")
def test_a_newer_result_replaces_one_that_waits(
    file: Path, other: sqlite3.Connection, environment: Environment, make_call: MakeCall
) -> None:
    call = make_call(1)
    with opened(file) as database:
        with database.writing_behind():
            other.execute("BEGIN IMMEDIATE")
            store(database, environment, call, 1.0)
            database.store(environment.key, [(call, Measurement("ok", 2.0))], replace=True)
            assert database.find(environment.key, [call.key])[call.key].median_us == 2.0
            other.execute("ROLLBACK")
        assert database.find(environment.key, [call.key])[call.key].median_us == 2.0


def run(database: Database, environment: Environment, calls: list[Call], before: Callable[[], object]) -> None:
    with database.writing_behind():
        before()
        for call in calls:
            store(database, environment, call)


@pytest.mark.usefixtures("hasty")
def test_what_could_not_be_stored_in_time_is_counted_in_all(
    file: Path, other: sqlite3.Connection, environment: Environment, make_call: MakeCall
) -> None:
    calls = [make_call(block) for block in range(3)]
    with opened(file, locked_s=0.5) as database:
        with pytest.raises(UnavailableError, match=r"is locked .*; 3 results that were measured are not stored$"):
            run(database, environment, calls, lambda: other.execute("BEGIN IMMEDIATE"))
        other.execute("ROLLBACK")
        store(database, environment, calls[0])
        assert len(database.measurements()) == 1


def test_a_file_that_is_gone_is_said_at_once(file: Path, environment: Environment, make_call: MakeCall) -> None:
    calls = [make_call(block) for block in range(3)]
    gone = r"was deleted while it was in use.*; 1 results that were measured are not stored$"
    with opened(file) as database, pytest.raises(DatabaseError, match=gone):
        run(database, environment, calls, file.unlink)


def test_what_is_known_is_waited_for_until_something_was_stored(
    file: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts while the database is away would measure everything anew."""
    now_s = 0.0
    monkeypatch.setattr(backlog, "monotonic", lambda: now_s)
    asked: list[float | None] = []

    def away(away_s: float | None) -> dict[str, Measurement]:
        asked.append(away_s)
        raise UnavailableError("it is away")

    with opened(file) as database, open_database(file, timeouts=Timeouts(1.0, 1.0, 0.2)) as short:
        log = backlog.Backlog(database._store_all, short._transactions.retrying)
        with pytest.raises(UnavailableError):
            log.looked_up(environment.key, away)
        assert asked == [None]
        log.has_begun = True
        assert log.looked_up(environment.key, away) == log.looked_up(environment.key, away) == {}
        assert asked == [None, backlog.PATIENCE_S]  # it was just asked
        now_s += 0.3
        with pytest.raises(UnavailableError):  # it stayed away for too long
            log.looked_up(environment.key, away)
        log.close()


@pytest.mark.timeout(60)
def test_what_fails_in_another_way_is_said_too(file: Path, environment: Environment, make_call: MakeCall) -> None:
    """A thread that died of it would store nothing more, and nobody would hear of it."""
    nothing: Measurement = None  # type: ignore[assignment]
    with opened(file) as database:
        with (
            pytest.raises(DatabaseError, match=r"^AttributeError: .*; 1 results that were measured are not stored$"),
            database.writing_behind(),
        ):
            database.store(environment.key, [(make_call(1), nothing)])
        store(database, environment, make_call(2))
        assert len(database.measurements()) == 1
