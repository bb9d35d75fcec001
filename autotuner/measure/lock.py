"""The lock of a device: one file per device and user, so that two tunings of a user never time on it at once.

The file lies in a folder that is the user's alone. In the temporary folder itself anybody could make it first, hold it
for ever, or put a link in its place. So two users who share a device do not keep each other from it. What protects
their timings is the check for contention before each race, which warns.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic

from autotuner.errors import MeasureError
from autotuner.measure.devices import device_of
from autotuner.settings import runtime_dir

LOCKS = Path("/proc/locks")
TELL_S = 1.0

Waiting = Callable[[float, str], None]
"""Told for how many seconds a lock was waited for so far, and a sentence on who holds it."""


def lock_path(device_type: str, device_index: int = 0) -> str:
    """Return the lock file: of all cores together, or of one CUDA device by its UUID, whatever its index here.

    Its folder is `autotuner-UID` in the temporary folder; where that is somebody else's, in `XDG_RUNTIME_DIR`. The
    former goes first, because every process of a user has it, also where no session of the user's is open.

    Raises:
        DeviceError: there is no such device here.
        MeasureError: both are somebody else's.
    """
    return str(_folder() / f"{device_of(device_type, device_index).lock_name}.lock")


@contextmanager
def locked(path: str, *, alone: bool, waiting: Waiting = lambda _waited_s, _words: None) -> Iterator[None]:
    """Hold the device: alone to time on it, together with others to compile where that would disturb timing.

    Args:
        waiting: told at once where somebody else holds it, every second while that stays, and at the end; an error
            that it raises ends the waiting.
    """
    import fcntl

    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    while True:
        file = _opened(Path(path))
        try:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                _wait(file, path, kind, waiting)
            if _is_at(file, path):  # not tidied away meanwhile: the next one to come would make another
                yield
                return
        finally:
            os.close(file)


def _folder() -> Path:
    places = [Path(tempfile.gettempdir()), *filter(None, [runtime_dir()])]
    folders = [place / f"autotuner-{os.getuid()}" for place in places]
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_private(folder):
                return folder
        except OSError:
            continue
    raise MeasureError(
        f"no folder for the lock of a device: {' and '.join(map(str, folders))} cannot be made, or can be written by "
        "others; remove what is there, or set TMPDIR to a folder of your own"
    )


def _is_private(folder: Path) -> bool:
    """Say whether a folder is this user's, no link, and written by nobody else."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _opened(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)  # it may have been tidied away since
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MeasureError(f"{path}: the lock of a device cannot be opened ({error.strerror}): remove it") from error
    if os.fstat(file).st_uid != os.getuid():
        os.close(file)
        raise MeasureError(f"{path}: the lock of a device is another user's: remove it")
    return file


def _is_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _wait(file: int, path: str, kind: int, waiting: Waiting) -> None:
    """Wait on a thread of its own: whoever asks in turns for a lock that is free for a moment hardly ever gets it."""
    import fcntl

    began = monotonic()
    # On a descriptor of its own, since whoever is told may end the waiting, and close the other one, at any moment.
    own = os.dup(file)

    def take() -> None:
        try:
            fcntl.flock(own, kind)
        finally:
            os.close(own)

    thread = Thread(target=take, name="lock", daemon=True)
    thread.start()
    while thread.is_alive():
        waiting(monotonic() - began, _words(holders(path)))
        thread.join(TELL_S)
    waiting(monotonic() - began, "")


def holders(path: str) -> list[int]:
    """Return the numbers of the processes that hold a lock file, as far as the system says."""
    try:
        inode, lines = os.stat(path).st_ino, LOCKS.read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines if "->" not in line]
    found = (row[4] for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode))
    return sorted({int(number) for number in found if number.isdigit()} - {0})


def _words(processes: Sequence[int]) -> str:
    """Say who holds the device."""
    held = " and ".join(str(number) for number in processes)
    who = f"held by {'processes' if len(processes) > 1 else 'process'} {held}" if held else "held by another tuning"
    return f"waiting for the device, {who}"
