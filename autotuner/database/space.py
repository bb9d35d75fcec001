"""Space on disk: what the volume of a database has left, and whether writes fail for want of it."""

import os
import tempfile
from pathlib import Path
from time import monotonic

from sqlalchemy.exc import SQLAlchemyError, StatementError

LEAST_BYTES = 2**26
"""A volume with less is full: the write-ahead log of an SQLite file and one transaction may need so much."""

FULL_FOR_S = 30.0
"""For how long a write that failed for want of space stands for the next ones: a server does not tell its disk."""

SQLITE_FULL = "database or disk is full"
SERVER_FULL = "53100"
"""PostgreSQL's code for a full disk."""


class DiskSpace:
    """The disk under a database.

    Args:
        file: of an SQLite database; None for a server, whose disk is elsewhere.
    """

    def __init__(self, file: Path | None) -> None:
        self._folder = None if file is None else file.absolute().parent
        self._failed_at: float | None = None

    @property
    def is_full(self) -> bool:
        """True where the volume has no space left, or a write has just failed for want of it."""
        free_bytes = self.free_bytes
        if free_bytes is not None and free_bytes < LEAST_BYTES:
            return True
        return self._failed_at is not None and monotonic() - self._failed_at < FULL_FOR_S

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are left for the database; None where that is not known."""
        return None if self._folder is None else _free_bytes(self._folder)

    @property
    def temporary_free_bytes(self) -> int | None:
        """Bytes that are left for temporary files of this process; None where that is not known."""
        return _free_bytes(Path(tempfile.gettempdir()))

    def heed(self, error: SQLAlchemyError) -> bool:
        """Note why a write failed, and return whether that was for want of space."""
        original = error.orig if isinstance(error, StatementError) else None
        full = str(original).startswith(SQLITE_FULL) or getattr(original, "sqlstate", None) == SERVER_FULL
        if full:
            self._failed_at = monotonic()
        return full

    def has_written(self) -> None:
        """Note that a write did not fail."""
        self._failed_at = None


def _free_bytes(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
