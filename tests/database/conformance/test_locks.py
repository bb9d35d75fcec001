"""Locks by name: held by one at a time, and freed with their holder, however that ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from autotuner.database import Database, locks, open_database
from autotuner.errors import LockHeldError

StartHolding = Callable[..., subprocess.Popen[str]]
WAIT_S = 60.0


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def free_after_s(database: Database, name: str) -> float:
    began = time.monotonic()
    while database.locks.is_held(name):
        assert time.monotonic() - began < WAIT_S
        time.sleep(0.01)
    return time.monotonic() - began


def test_a_lock_is_held_while_the_context_lasts(database: Database) -> None:
    assert not database.locks.is_held("é")
    with database.locks.hold("é") as held, database.locks.hold("other"):
        assert (held.name, held.is_held, held.losses) == ("é", True, 0)
        assert database.locks.held(["é", "other", "third"]) == {"é", "other"}
    assert free_after_s(database, "é") < WAIT_S
    assert database.locks.held([]) == set()
    with database.locks.hold("é"):
        assert database.locks.is_held("é")


def test_a_lock_is_held_once_in_one_process_too(url: str, database: Database) -> None:
    with database.locks.hold("n"):
        for same in (database, open_database(url)):
            with (
                pytest.raises(LockHeldError, match="'n' is in use by another process on this database"),
                same.locks.hold("n"),
            ):
                pass
        assert database.locks.is_held("n")


def test_of_threads_that_take_a_lock_at_once_one_gets_it(url: str, database: Database) -> None:
    barrier, over, got = threading.Barrier(4), threading.Event(), []

    def take() -> None:
        with open_database(url) as own:
            barrier.wait(WAIT_S)
            try:
                with own.locks.hold("n"):
                    got.append("held")
                    over.wait(WAIT_S)
            except LockHeldError:
                got.append("refused")
            if got.count("refused") == 3:
                over.set()

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(got) == ["held", "refused", "refused", "refused"]
    assert not database.locks.is_held("n")


@pytest.mark.slow
def test_the_lock_of_a_process_that_is_killed_is_free_at_once(database: Database, start_holding: StartHolding) -> None:
    process = start_holding("n", "lock")
    said(process)
    assert database.locks.is_held("n")
    process.send_signal(signal.SIGSTOP)  # frozen is not dead
    assert database.locks.is_held("n")
    process.kill()
    process.wait()
    if "sqlite" in type(database.locks._engine).__name__.lower():
        assert not database.locks.is_held("n")
    assert free_after_s(database, "n") < 2.0


@pytest.mark.slow
def test_a_forked_process_does_not_keep_the_lock_of_its_parent(database: Database, start_holding: StartHolding) -> None:
    process = start_holding("n", "fork")
    child = int(said(process))
    assert database.locks.is_held("n")
    process.kill()
    process.wait()
    try:
        assert free_after_s(database, "n") < 2.0
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_that_is_started_does_not_keep_the_lock(database: Database) -> None:
    with database.locks.hold("n"):
        started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        assert free_after_s(database, "n") < 2.0
        assert started.poll() is None
    finally:
        started.communicate(b"\n")


def test_a_forked_process_that_ends_frees_nothing(database: Database) -> None:
    with database.locks.hold("n") as held:
        child = os.fork()
        if not child:
            held.end()
            os._exit(0)
        os.waitpid(child, 0)
        assert database.locks.is_held("n")
        assert held.is_held


def test_a_holder_is_gone_when_its_lock_was_seen_free_for_long_enough(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(locks, "monotonic", lambda: now[0])
    monkeypatch.setattr(type(database.locks._engine), "patience_s", 10.0)
    assert database.locks.gone(["n"]) == set()
    now[0] = 109.0
    assert database.locks.gone(["n"]) == set()
    with database.locks.hold("n"):
        now[0] = 111.0
        assert database.locks.gone(["n"]) == set()
    assert database.locks.gone(["n", "other"]) == set()
    now[0] = 121.0
    assert database.locks.gone(["n", "other"]) == {"n", "other"}
    assert database.locks.gone([]) == set()


def test_names_that_nobody_asks_for_any_more_are_forgotten(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "FORGOTTEN_S", 0.2)
    names = [f"gone {number}" for number in range(1000)]
    assert database.locks.gone(names) == set(names)
    time.sleep(0.3)
    assert database.locks.gone(names[:3]) == set(names[:3])
    assert len(database.locks._free) == 3
