"""Many processes and threads on one database, and processes that are killed: nothing is lost, nothing comes twice."""

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotuner.database import Storage, open_database
from autotuner.ir.records import Call, Environment, Measurement

pytestmark = pytest.mark.slow

STORING = Path(__file__).with_name("storing.py")


def start_storing(url: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(STORING), url, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_make_one_database_and_store_the_same_calls_neither_fail_nor_duplicate(url: str) -> None:
    processes = [start_storing(url, 20, 10, order) for order in ("FORWARD", "REVERSED", "FORWARD", "REVERSED")]
    lines = [line.split() for process in processes for line in process.communicate(timeout=240)[0].splitlines()]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    with open_database(url) as database:
        (environment,) = database.environments()
        assert database.statistics().statuses["ok"] == 200
        assert sum(int(written) for written, *_ in lines) == 200
        assert set(database.find(environment.key, {key for _, *keys in lines for key in keys})) == {
            found.call.key for found in database.measurements()
        }


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.05])
def test_what_was_committed_survives_a_kill_in_the_middle_of_storing(url: str, wait_s: float) -> None:
    with start_storing(url, 100_000, 200) as process:
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
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
    with open_database(url) as database:
        (environment,) = database.environments()
        assert committed <= set(database.find(environment.key, committed))
        assert database.statistics().statuses["ok"] % 200 == 0
        assert database.queue.enqueue(model="m", request={}, device_type="cpu").id == 1


def test_threads_share_one_database(
    database: Storage, environment: Environment, make_call: Callable[..., Call]
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
