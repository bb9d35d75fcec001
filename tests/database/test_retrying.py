"""Retries on a database that is locked, away or silent: their timeouts, and their end with the process."""

import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotuner.database import Timeouts, open_database
from autotuner.database.engine import make_engine, read_url
from autotuner.database.retrying import Retrying
from autotuner.errors import DatabaseError, UnavailableError
from autotuner.ir.records import Call, Environment, Measurement
from tests.silent import on, silent

LONG_S = 60.0
"""More than any wait of these tests may take on a machine that is busy."""

PATIENT = Timeouts(answer_s=1.0, locked_s=LONG_S, away_s=LONG_S)
HASTY = Timeouts(answer_s=1.0, locked_s=0.0, away_s=0.0)


class Asked:
    """A transaction that fails some times, and then says 7."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.times = 0

    def __call__(self) -> int:
        self.times += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


def away() -> UnavailableError:
    return UnavailableError("the server closed the connection")


def noted() -> tuple[list[str], Callable[..., None]]:
    events: list[str] = []
    return events, lambda event, **_: events.append(event)


def test_a_database_that_is_away_is_asked_until_it_is_back_and_both_are_said() -> None:
    events, log = noted()
    asked = Asked(away(), away(), away())
    assert Retrying(PATIENT, log).call(asked) == 7
    assert (asked.times, events) == (4, ["database_waited_for", "database_back"])


def test_what_does_not_pass_is_not_asked_again() -> None:
    asked = Asked(DatabaseError("no such table"))
    with pytest.raises(DatabaseError, match="no such table"):
        Retrying(PATIENT).call(asked)
    assert asked.times == 1


def test_an_outage_is_waited_for_once_whoever_asks() -> None:
    retrying = Retrying(Timeouts(answer_s=1.0, locked_s=0.0, away_s=0.3), noted()[1])
    asked = Asked(*(away() for _ in range(1000)))
    with pytest.raises(UnavailableError):
        retrying.call(asked)
    times = asked.times
    assert times > 1
    with pytest.raises(UnavailableError):
        retrying.call(asked)
    assert asked.times == times + 1


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_nothing_is_waited_for_on_the_way_out_of_the_process(end: type[BaseException]) -> None:
    asked = Asked(away(), away())
    retrying = Retrying(PATIENT)

    def leave() -> None:
        try:
            raise end
        finally:
            retrying.call(asked)

    with pytest.raises(UnavailableError):
        leave()
    assert asked.times == 1


def test_an_interrupt_that_somebody_handles_already_hurries_nobody() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        retrying = Retrying(PATIENT, noted()[1])
        assert retrying.call(Asked(away(), away())) == 7
    assert retrying.call(Asked(away(), away())) == 7


def test_an_interrupt_that_is_caught_leaves_the_database_to_who_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotuner.database.retrying.HURRY_S", 0.0)
    retrying = Retrying(PATIENT)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(UnavailableError, match="not asked any more"):
            retrying.call(Asked())
    assert retrying.call(Asked(UnavailableError("locked", locked=True))) == 7
    retrying.hurry()
    with pytest.raises(UnavailableError, match="not asked any more"):
        retrying.call(Asked())


def test_hurrying_ends_a_wait_of_another_thread() -> None:
    retrying = Retrying(PATIENT, noted()[1])
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(UnavailableError):
            retrying.call(Asked(*(away() for _ in range(1000))))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    retrying.hurry()
    assert ended.wait(LONG_S / 2)
    thread.join()


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """A database that is open elsewhere too."""
    file = tmp_path / "timings.sqlite"
    open_database(file).close()
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    yield file, other
    other.close()


def test_results_wait_in_memory_while_another_process_holds_the_write_lock(
    locked: tuple[Path, sqlite3.Connection], environment: Environment, make_call: Callable[..., Call]
) -> None:
    """Many times as long as SQLite itself waits: 42 s against 30 s before, here 1 s against 0.05 s."""
    file, other = locked
    with open_database(file, timeouts=replace(PATIENT, busy_s=0.05)) as database:
        database.remember(environment)
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(1.0, other.execute, ["ROLLBACK"])
        release.start()
        assert database.store(environment.key, iter([(make_call(1), Measurement("ok", 1.0))])) == 1
        release.join()
        assert database.statistics().statuses["ok"] == 1


def test_results_that_cannot_be_stored_are_counted_in_the_error(
    locked: tuple[Path, sqlite3.Connection], environment: Environment, make_call: Callable[..., Call]
) -> None:
    file, other = locked
    with open_database(file, timeouts=HASTY) as database:
        database.remember(environment)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match=r"; 2 results that were measured are not stored$"):
            database.store(environment.key, [(make_call(n), Measurement("ok", 1.0)) for n in (1, 2)])


def test_a_process_that_opens_a_file_while_another_makes_it_waits(tmp_path: Path) -> None:
    file = tmp_path / "timings.sqlite"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE begun (id INTEGER)")
    other.execute("BEGIN IMMEDIATE")
    rollback = threading.Timer(0.3, other.execute, ["ROLLBACK"])
    rollback.start()
    started_s = time.monotonic()
    engine = make_engine(read_url(file))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    assert time.monotonic() - started_s >= 0.2
    engine.dispose()
    rollback.join()
    other.close()


def test_a_writer_waits_for_its_turn_and_then_says_who_to_end(tmp_path: Path, environment: Environment) -> None:
    file = tmp_path / "timings.sqlite"
    with open_database(file, timeouts=Timeouts(answer_s=1, locked_s=0.5, away_s=0)) as database:
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        started_s = time.monotonic()
        with pytest.raises(UnavailableError, match=r"is locked by another process .*: end that process") as caught:
            database.remember(environment)
        assert caught.value.locked
        assert time.monotonic() - started_s >= 0.5
        assert database.environments() == []
        other.execute("ROLLBACK")
        other.close()
        database.remember(environment)
        assert database.environments() == [environment]


# A server


@pytest.mark.parametrize("welcomes, words", [(False, "timeout expired"), (True, "the server did not answer for")])
@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_is_given_up(welcomes: bool, words: str) -> None:
    began = time.monotonic()
    with silent(welcomes=welcomes) as url, on(url, HASTY) as database:
        with pytest.raises(UnavailableError, match=words) as caught:
            database.queue.jobs()
        assert "secret" not in str(caught.value)
    assert time.monotonic() - began < LONG_S


def test_a_server_that_is_not_there_is_refused_at_once_when_it_is_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UnavailableError, match="refused"):
        open_database(f"postgresql+psycopg://tuner@127.0.0.1:{port}/tunings", timeouts=PATIENT)


@pytest.mark.parametrize("welcomes", [False, True])
@pytest.mark.slow
def test_while_a_server_is_known_to_be_away_everybody_is_refused_at_once(welcomes: bool) -> None:
    """The first finds it out, within seconds; who asks after that, alone or with others, waits for nothing."""
    with silent(welcomes=welcomes) as url, on(url, HASTY) as database:
        with pytest.raises(UnavailableError, match=r"did not answer|timeout"):
            database.queue.jobs()
        words: list[str] = []

        def ask() -> None:
            with pytest.raises(UnavailableError) as caught:
                database.queue.jobs()
            words.append(str(caught.value))

        began = time.monotonic()
        for _ in range(20):
            ask()
            time.sleep(0.05)
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert time.monotonic() - began < 15.0, "each that asked the server itself would take 1.5 s, or 3 s"
        assert set(words) == {"the database is away, as another request has found"}


def test_connections_to_a_server_are_checked_before_use() -> None:
    engine = make_engine(read_url("postgresql+psycopg://tuner@127.0.0.1/tunings"))
    assert engine.pool._pre_ping
