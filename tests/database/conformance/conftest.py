"""Processes of their own that hold locks and jobs, and runners that are gone."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from autotuner.database import Database, Queue, Storage
from autotuner.database.session_locks import SessionLocks

HOLDING = Path(__file__).with_name("holding.py")


@pytest.fixture
def queue(database: Storage) -> Queue:
    return database.queue


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a lock that is free on PostgreSQL mean at once that its holder is gone."""
    monkeypatch.setattr(SessionLocks, "patience_s", 0.0)


@pytest.fixture
def alive(database: Database) -> Iterator[Callable[..., None]]:
    """Hold the locks of runners until the end of the test; all others are gone."""
    with ExitStack() as stack:

        def hold(*names: str) -> None:
            for name in names:
                stack.enter_context(database.locks.hold(name))

        yield hold


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
