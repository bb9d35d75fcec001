import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from autotuner.database import lease, this_process
from autotuner.database.lease import is_gone

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PAST, FUTURE = NOW - timedelta(seconds=1), NOW + timedelta(seconds=1)
SAYS_ITS_NAME = "from autotuner.database import this_process; print(this_process(), flush=True); input()"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SAYS_ITS_NAME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def name_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_has_one_name_and_another_process_another(other: subprocess.Popen[str]) -> None:
    mine, its = this_process(), name_of(other)
    assert this_process() == mine
    assert mine != its
    assert mine.split(":")[0] == its.split(":")[0]
    assert int(its.split(":")[1]) == other.pid


def test_a_process_that_lives_is_never_gone_however_old_its_lease(other: subprocess.Popen[str]) -> None:
    for name in (this_process(), name_of(other)):
        assert not is_gone(name, PAST, NOW)
        assert not is_gone(f"{name}#walk", PAST, NOW)


def test_a_process_that_was_killed_is_gone_before_its_parent_has_noticed(other: subprocess.Popen[str]) -> None:
    name = name_of(other)
    other.kill()
    assert other.stdout is not None
    assert other.stdout.read() == ""  # its end of the pipe is closed, and nobody has waited for it
    while not is_gone(name, FUTURE, NOW):
        assert other.returncode is None
    assert is_gone(f"{name}#walk", FUTURE, NOW)
    other.wait()
    assert is_gone(name, FUTURE, NOW)


def test_a_process_that_has_the_number_of_an_earlier_one_is_not_taken_for_it() -> None:
    name, _, start = this_process().rpartition(":")
    assert is_gone(f"{name}:{int(start) - 1}", FUTURE, NOW)


@pytest.mark.parametrize("name", ["elsewhere/1:1:1", "elsewhere", "", "a:b:c", "HERE", "HERE:1", "HERE:1:x"])
def test_of_an_owner_elsewhere_or_with_a_name_of_its_own_only_the_lease_tells(name: str) -> None:
    name = name.replace("HERE", this_process().split(":")[0])
    assert is_gone(name, PAST, NOW)
    assert not is_gone(name, NOW, NOW)
    assert not is_gone(name, FUTURE, NOW)


def test_where_processes_cannot_be_looked_for_only_the_lease_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_start", lambda _: 0)
    assert this_process().endswith(":0")
    assert is_gone(this_process(), PAST, NOW)
    assert not is_gone(this_process(), FUTURE, NOW)


def test_a_host_whose_name_has_a_colon_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "fe80::1")
    assert this_process().startswith("fe80--1/")
    assert not is_gone(this_process(), PAST, NOW)


def test_another_host_of_the_same_name_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_process()
    monkeypatch.setattr(lease, "_BOOT", lease._BOOT.with_name("uuid"))  # a new value at each reading
    assert this_process().split("/")[0] == here.split("/")[0]
    assert not is_gone(here, FUTURE, NOW)
    assert is_gone(here, PAST, NOW)
