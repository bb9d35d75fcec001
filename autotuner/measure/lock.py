"""The lock of a device: one file per device and user, so that two tunings on a host never time on it at once."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import IO

from autotuner.device import cuda_uuid

LOCKS = Path("/proc/locks")
TELL_S = 1.0

Waiting = Callable[[float, str], None]
"""Told for how many seconds a lock was waited for so far, and a sentence on who holds it."""


def lock_path(device_type: str, device_index: int = 0) -> str:
    """Return the lock file: of all cores together, or of one CUDA device by its UUID, whatever its index here."""
    which = f"cuda-{cuda_uuid(device_index)}" if device_type == "cuda" else device_type
    return str(Path(tempfile.gettempdir()) / f"autotuner-{which}-{os.getuid()}.lock")


@contextmanager
def locked(path: str, *, alone: bool, waiting: Waiting = lambda _waited_s, _words: None) -> Iterator[None]:
    """Hold the device: alone to time on it, together with others to compile beside them.

    Args:
        waiting: told at once where somebody else holds it, every second while that stays, and at the end; an error
            that it raises ends the waiting.
    """
    import fcntl

    with open(path, "a") as file:
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait(file, kind, waiting)
        yield


def _wait(file: IO[str], kind: int, waiting: Waiting) -> None:
    """Wait on a thread of its own: whoever asks in turns for a lock that is free for a moment hardly ever gets it."""
    import fcntl

    began, path = monotonic(), file.name
    thread = Thread(target=fcntl.flock, args=(file.fileno(), kind), name="lock", daemon=True)
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
