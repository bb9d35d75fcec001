import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotuner.database import Database, Patience, open_database, opening
from autotuner.errors import UnavailableError
from autotuner.ir.records import Call, Environment, Measurement

STORING = Path(__file__).with_name("storing.py")


def start_storing(url: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(STORING), url, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_make_one_database_and_store_the_same_calls_neither_fail_nor_duplicate(url: str) -> None:
    processes = [start_storing(url, 20, 10, order) for order in ("FORWARD", "REVERSED", "FORWARD", "REVERSED")]
    lines = [line.split() for process in processes for line in process.communicate(timeout=60)[0].splitlines()]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    with open_database(url) as database:
        (environment,) = database.environments()
        assert database.statistics().statuses["ok"] == 200
        assert sum(int(written) for written, *_ in lines) == 200
        assert set(database.find(environment.key, {key for _, *keys in lines for key in keys})) == {
            found.call.key for found in database.measurements()
        }


def test_a_process_that_opens_a_file_while_another_makes_it_waits(tmp_path: Path) -> None:
    file = tmp_path / "timings.sqlite"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE begun (id INTEGER)")
    other.execute("BEGIN IMMEDIATE")
    rollback = threading.Timer(0.3, other.execute, ["ROLLBACK"])
    rollback.start()
    started_s = time.monotonic()
    engine = opening.make_engine(opening.read_url(file))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    assert time.monotonic() - started_s >= 0.2
    engine.dispose()
    rollback.join()
    other.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.05])
def test_what_was_committed_survives_a_kill_in_the_middle_of_storing(tmp_path: Path, wait_s: float) -> None:
    file = tmp_path / "timings.sqlite"
    with start_storing(str(file), 100_000, 200) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        time.sleep(wait_s)
        process.kill()
        reader.join()
    assert process.returncode == -9
    committed = {key for line in (first, *lines) if line.endswith("\n") for key in line.split()[1:]}
    assert len(committed) >= 200
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    with open_database(file) as database:
        (environment,) = database.environments()
        assert committed <= set(database.find(environment.key, committed))
        assert database.statistics().statuses["ok"] % 200 == 0
        assert database.queue.enqueue(model="m", request={}, device_type="cpu").id == 1


def test_threads_share_one_database(
    database: Database, environment: Environment, make_call: Callable[..., Call]
) -> None:
    def store(first: int) -> None:
        for block in range(first, first + 20):
            database.store(environment.key, [(make_call(block), Measurement("ok", 1.0))])

    threads = [threading.Thread(target=store, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.statistics().statuses["ok"] == 40


def test_a_writer_waits_for_its_turn_and_then_says_who_to_end(tmp_path: Path, environment: Environment) -> None:
    file = tmp_path / "timings.sqlite"
    with open_database(file, patience=Patience(answer_s=1, locked_s=0.5, away_s=0)) as database:
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
