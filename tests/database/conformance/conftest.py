"""Processes of their own that hold jobs and calls, and a database whose leases run out at once."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotuner.database import Database, Leases, Queue, Storage, open_database

HOLDING = Path(__file__).with_name("holding.py")


@pytest.fixture
def queue(database: Storage) -> Queue:
    return database.queue


@pytest.fixture
def expired(url: str, database: Database) -> Iterator[Storage]:  # noqa: ARG001 (it makes the tables)
    """The same database, in which every lease that is given, and every worker, is out of date at once."""
    with open_database(url, leases=Leases(job_s=-1.0, call_s=-1.0)) as opened:
        yield opened


@pytest.fixture
def expire(expired: Storage) -> Callable[..., None]:
    """Let the lease of a job run out, by renewing it to the past."""

    def renewed(job_id: int, worker: str = "elsewhere/1:1:1", *, advanced: bool = False) -> None:
        assert expired.queue.renew(job_id, worker, advanced=advanced) != "lost"

    return renewed


@pytest.fixture
def start_holding(url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `holding.py` on the test's database; what still runs after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HOLDING), url, *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
