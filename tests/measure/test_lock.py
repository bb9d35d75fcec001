"""The lock of a device: which file, and who shares it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotuner.measure import lock
from autotuner.measure.lock import lock_path, locked

UNKNOWN = "waiting for the device, held by another tuning"


def test_a_cuda_device_is_locked_by_its_uuid_whatever_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "cuda_uuid", lambda index: ("GPU-a", "GPU-b", "GPU-a")[index])
    assert lock_path("cuda", 0) == lock_path("cuda", 2)
    assert lock_path("cuda", 0) != lock_path("cuda", 1)
    assert "cuda" not in lock_path("cpu")


@pytest.mark.parametrize(("alone", "others_may"), [(True, False), (False, True)])
def test_compiling_shares_a_device_and_timing_does_not(tmp_path: Path, alone: bool, others_may: bool) -> None:
    path = tmp_path / "lock"
    with locked(str(path), alone=alone), path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            shared = True
        except BlockingIOError:
            shared = False
    assert shared is others_may


def held_by_another(path: Path) -> subprocess.Popen[str]:
    """Return a process that holds a lock file until its input ends."""
    program = f"import fcntl, sys; f = open({str(path)!r}, 'a'); fcntl.flock(f, 2); print('held', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_whoever_waits_is_told_who_holds_the_device_and_when_that_is_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = held_by_another(path)
    told: list[tuple[float, str]] = []

    def waiting(waited_s: float, words: str) -> None:
        told.append((waited_s, words))
        if len(told) == 2:
            other.communicate("\n")

    with locked(str(path), alone=True, waiting=waiting):
        assert lock.holders(str(path)) in ([os.getpid()], [])
    assert told[0][1] in (f"waiting for the device, held by process {other.pid}", UNKNOWN)
    assert told[-1][1] == ""
    assert [waited_s for waited_s, _ in told] == sorted(waited_s for waited_s, _ in told)


def test_whoever_is_told_can_end_the_waiting(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = held_by_another(path)

    def waiting(_waited_s: float, _words: str) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError), locked(str(path), alone=True, waiting=waiting):
        pass
    other.communicate("\n")
    with locked(str(path), alone=True):
        pass


def test_without_a_list_of_locks_the_holder_is_another_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCKS", tmp_path / "none")
    assert lock.holders(str(tmp_path)) == []
    assert lock._words([]) == UNKNOWN
