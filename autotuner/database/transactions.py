"""Transactions on an engine: connections to read and to write, on the file that was opened and on no other."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import SQLAlchemyError

from autotuner.database.engine import WRITES, explained, is_sqlite, shown
from autotuner.database.migrations import migrate
from autotuner.database.retrying import Retrying
from autotuner.database.space import DiskSpace
from autotuner.database.tables import EnvironmentRow
from autotuner.errors import DatabaseError


class Transactions:
    """Connections in which to read or write; every error is one that says which database, and what would be valid.

    An SQLite file that was deleted or replaced would be written on, without a name and lost with its last connection:
    each transaction compares the file with the one that was opened.

    Args:
        reopens: go on with another file that has taken the place of the one that was opened.
    """

    def __init__(self, engine: Engine, retrying: Retrying, *, reopens: bool = False) -> None:
        self.engine, self.retrying = engine, retrying
        self._reopens = reopens
        self._reopening = threading.Lock()
        self._path = os.path.abspath(str(engine.url.database)) if is_sqlite(engine.url) else None
        self.space = DiskSpace(None if self._path is None else Path(self._path))
        self._file, self._log = self._found(), self._found("-wal")
        self._generation = 0
        if self._path is None:
            retrying.probe = self._probe

    @property
    def shown(self) -> str:
        """The name of the database in messages."""
        return shown(self.engine.url)

    @property
    def generation(self) -> int:
        """The number of files that took the place of the one that was opened first.

        Raises:
            DatabaseError: the file is gone, or was replaced and is not to be reopened.
        """
        self._check()
        return self._generation

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        self._check()
        try:
            with self.engine.connect() as connection:
                yield connection
                self._log = self._found("-wal")
        except SQLAlchemyError as error:
            raise explained(error, self.engine.url) from error

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """On SQLite the transaction holds the write lock from its start, so what it reads stays true until it ends."""
        self._check()
        file = self._file
        try:
            with self.engine.connect().execution_options(**WRITES) as connection, connection.begin():
                yield connection
                self._log = self._found("-wal")
        except SQLAlchemyError as error:
            if self.space.heed(error):
                self.retrying.log("disk_full", error=str(getattr(error, "orig", error)))
            raise explained(error, self.engine.url) from error
        self.space.has_written()
        if self._found() != file:
            raise self._gone()

    def close(self) -> None:
        """Close the connections, and look for a server no more."""
        self.retrying.probe = None
        self.engine.dispose()

    def _probe(self) -> None:
        with self.reading() as connection:
            connection.execute(select(1))

    def reopen(self) -> None:
        """Go on with the file that is there now, if it is not the one that was opened.

        Raises:
            DatabaseError: it is no database of this product, or the write-ahead log beside it is the old one's.
        """
        with self._reopening:
            found = self._found()
            if found in (None, self._file):
                return
            if self._log is not None and self._log == self._found("-wal") and os.path.getsize(str(self._path)):
                raise DatabaseError(
                    f"{self.shown} was replaced by another file while it was in use, and SQLite would write the old "
                    f"one's log into it: remove {self._path}-wal and {self._path}-shm, or put the old file back"
                )
            self.engine.dispose()
            try:
                migrate(self.engine)
            except SQLAlchemyError as error:
                raise explained(error, self.engine.url) from error
            self._file = self._found()
            self._generation += 1

    def _check(self) -> None:
        """Raise an error where the file is not the one that was opened."""
        if self._reopens and self._found() != self._file:
            self.reopen()
        if self._found() != self._file:
            raise self._gone()

    def _found(self, suffix: str = "") -> tuple[int, int] | None:
        """Return what tells the file at the path from every other; None where there is none."""
        try:
            status = os.stat(self._path + suffix) if self._path is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_dev, status.st_ino)

    def _gone(self) -> DatabaseError:
        what = "deleted" if self._found() is None else "replaced by another file"
        return DatabaseError(
            f"{self.shown} was {what} while it was in use, and what was stored is gone with it: put the file back, or "
            "start again"
        )

    def environment_id(self, connection: Connection, key: str) -> int:
        """Return the number of an environment."""
        query = select(EnvironmentRow.id).where(EnvironmentRow.key == key)
        found = connection.execute(query).scalar_one_or_none()
        if found is None:
            raise DatabaseError(f"{self.shown} has no environment {key!r}: `remember` it first")
        return found
