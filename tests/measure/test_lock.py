"""The lock of a device: which file, whose it is, and who shares it."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autotuner.errors import MeasureError
from autotuner.measure import devices, lock
from autotuner.measure.devices import cuda
from autotuner.measure.devices.cuda import CudaDevice
from autotuner.measure.lock import lock_path, locked

STRANGER = 65534
UNKNOWN = "waiting for the device, held by another tuning"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, of this test alone; there is no other for what processes share."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


def own(folder: Path) -> Path:
    return folder / f"autotuner-{os.getuid()}"


def test_a_cuda_device_is_locked_by_its_uuid_whatever_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.FOUND, "cuda", lambda: [CudaDevice("cuda", "A", index) for index in range(3)])
    monkeypatch.setattr(cuda, "cuda_uuid", lambda index: ("GPU-a", "GPU-b", "GPU-a")[index])
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


def test_the_lock_lies_in_a_folder_that_only_its_user_can_enter(temporary: Path) -> None:
    path = Path(lock_path("cpu"))
    assert path == own(temporary) / "cpu.lock"
    assert own(temporary).stat().st_mode & 0o777 == 0o700
    with locked(str(path), alone=True):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("taken", ["linked", "open to all", "a file"])
def test_a_folder_that_others_could_write_is_not_used(temporary: Path, taken: str) -> None:
    folder = own(temporary)
    if taken == "linked":
        (temporary / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(temporary / "elsewhere")
    elif taken == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.touch()
    with pytest.raises(MeasureError, match=rf"{folder} cannot be made, or can be written by others; remove what is"):
        lock_path("cpu")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to somebody else")
def test_a_folder_that_another_user_made_first_is_not_used(temporary: Path) -> None:
    own(temporary).mkdir(mode=0o700)
    os.chown(own(temporary), STRANGER, STRANGER)
    with pytest.raises(MeasureError, match="or set TMPDIR to a folder of your own"):
        lock_path("cpu")


def test_where_the_folder_is_taken_the_lock_lies_in_the_runtime_directory(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(temporary).touch()
    runtime = temporary / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert lock_path("cpu") == str(own(runtime) / "cpu.lock")


def test_a_link_in_the_place_of_the_lock_is_not_followed(temporary: Path) -> None:
    path = Path(lock_path("cpu"))
    path.symlink_to(temporary / "elsewhere")
    with pytest.raises(MeasureError, match="the lock of a device cannot be opened"), locked(str(path), alone=True):
        pass
    assert not (temporary / "elsewhere").exists()


def test_a_lock_that_was_tidied_away_is_made_anew_and_waited_for_again(temporary: Path) -> None:
    path = lock_path("cpu")
    held = threading.Event()

    def second() -> None:
        with locked(path, alone=True):
            held.set()

    with locked(path, alone=True):
        thread = threading.Thread(target=second)
        thread.start()
        assert not held.wait(0.2)
        Path(path).unlink()
        with locked(path, alone=True):
            pass
    assert held.wait(60)
    thread.join()
    own(temporary).joinpath("cpu.lock").unlink()
    own(temporary).rmdir()
    with locked(path, alone=True):
        assert Path(path).exists()


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
