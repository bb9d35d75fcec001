"""Locks of an SQLite database: open file description locks (Linux), each on one byte of a file beside the database.

They belong to the descriptor, unlike POSIX locks: two threads exclude each other, and closing another descriptor of the
same file frees nothing. The system frees them with the last descriptor, so at the latest with the process. The file is
empty and stays; SQLite's own files cannot be used, as SQLite's locks on them are POSIX locks of the process.
"""

import errno
import os
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection

from autotuner.database.locks import Lock, LockEngine, leave_to_the_parent, number_of
from autotuner.errors import DatabaseError

with suppress(ImportError):  # where there is no Linux
    from fcntl import F_OFD_GETLK, F_OFD_SETLK, F_UNLCK, F_WRLCK, fcntl

HAS_LOCKS = "F_OFD_SETLK" in globals()

FLOCK = "hhqqi0q"
"""`struct flock`: type, whence, start, length and process (0 for such locks)."""

SUFFIX = "-locks"
TAKEN = (errno.EACCES, errno.EAGAIN)


class FileLock(Lock):
    """A lock on the byte of a name."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._number = path, number_of(name)
        self._file: int | None = None

    def take(self) -> bool:
        if not HAS_LOCKS:
            raise DatabaseError(
                "jobs on an SQLite database need locks of Linux (F_OFD_SETLK), which this system has not: use Linux, "
                "or a PostgreSQL database"
            )
        file = self._opened()
        try:
            fcntl(file, F_OFD_SETLK, _asked(self._number))
        except OSError as error:
            os.close(file)
            if error.errno in TAKEN:
                return False
            raise DatabaseError(
                f"{self._path}: this file system has no locks of open files ({error.strerror}): keep the database on a "
                "local disk, or use PostgreSQL"
            ) from error
        self._file = file
        return True

    def is_intact(self) -> bool:
        """Say whether the file is still the one at its path: one that took its place knows nothing of this lock."""
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            return False

    def drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def disown(self) -> None:
        if self._file is not None:
            leave_to_the_parent(self._file)

    def _opened(self) -> int:
        database = Path(self._path.removesuffix(SUFFIX))
        try:
            mode = database.stat().st_mode & 0o666  # whoever may write the database may lock it
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
            if os.fstat(file).st_uid == os.geteuid():
                os.fchmod(file, mode)
        except OSError as error:
            raise DatabaseError(
                f"{self._path}, in which those who run jobs are known, cannot be written ({error.strerror}): let this "
                f"user write it and {database.parent}"
            ) from error
        return file


class FileLocks(LockEngine):
    """Locks beside an SQLite file."""

    patience_s = 0.0

    def __init__(self, database: str) -> None:
        self._path = os.path.realpath(database) + SUFFIX

    def lock(self, name: str) -> FileLock:
        return FileLock(self._path, name)

    def held(self, names: Collection[str], connection: Connection | None) -> set[str]:  # noqa: ARG002
        if not HAS_LOCKS:
            return set()
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise DatabaseError(f"{self._path} cannot be read ({error.strerror}): let this user read it") from error
        try:
            return {name for name in names if _is_taken(file, number_of(name))}
        finally:
            os.close(file)


def _asked(number: int) -> bytes:
    return struct.pack(FLOCK, F_WRLCK, os.SEEK_SET, number, 1, 0)


def _is_taken(file: int, number: int) -> bool:
    kind: int = struct.unpack(FLOCK, fcntl(file, F_OFD_GETLK, _asked(number)))[0]
    return kind != F_UNLCK
