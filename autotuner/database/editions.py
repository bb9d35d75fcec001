"""Editions: whether a model with exact extents has other configurations than before, asked before every answer."""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from autotuner.database.configurations import extents_key
from autotuner.database.engine import explained, is_sqlite
from autotuner.database.retrying import retried
from autotuner.database.transactions import Transactions

ExactKey = tuple[str, str, str]
"""Family, dtype and key of the extents, as the index of configurations has them."""


@dataclass(frozen=True, slots=True)
class Edition:
    """The number of configurations of one exact key, and the newest of them.

    While an edition stays, and it has any, so does the best configuration for its key on each device. The number of
    those that were removed or came late, with a lesser id, is seen as well.

    Args:
        generation: of the database's file; ids start anew in each.
        newest: 0 without any.
    """

    generation: int
    number: int = 0
    newest: int = 0


class SqlEditions:
    """Editions in a database: one statement on a connection of its own, without a transaction around it."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._lock = threading.Lock()
        self._kept: Connection | None = None

    @staticmethod
    def key(family: str, dtype: str, extents: Mapping[str, int]) -> ExactKey:
        return family, dtype, extents_key(extents)

    @retried
    def of(self, keys: Collection[ExactKey]) -> dict[ExactKey, Edition]:
        """Return the edition of each key, all as of one moment after the call began."""
        generation = self._transactions.generation
        query, values = self._query(keys)
        found = {key: Edition(generation) for key in keys}
        for attempt in (1, 2):
            fresh = self._kept is None or attempt == 2
            try:
                with self._connected() as connection:
                    rows = connection.exec_driver_sql(query, values).all()
                break
            except SQLAlchemyError as error:
                if fresh:  # otherwise the server may have been restarted since the connection was made
                    raise explained(error, self._transactions.engine.url) from error
        for *key, number, newest in rows:
            found[key[0], key[1], key[2]] = Edition(generation, number, newest)
        return found

    def _query(self, keys: Collection[ExactKey]) -> tuple[str, tuple[Any, ...]]:
        """Return the statement in the driver's own words, which SQLAlchemy would take ten times as long to write."""
        columns = [list(dict.fromkeys(column)) for column in zip(*keys, strict=True)]
        if is_sqlite(self._transactions.engine.url):
            sets = [f"IN ({','.join('?' * len(column))})" for column in columns]
            return _EDITIONS.format(*sets), tuple(value for column in columns for value in column)
        return _EDITIONS.format(*["= ANY(%s)"] * 3), tuple(columns)

    def close(self) -> None:
        with self._lock:
            self._drop()

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """A kept connection of a server, which takes one round trip in place of four; a new one of a file."""
        if is_sqlite(self._transactions.engine.url):
            with self._transactions.reading() as connection:
                yield connection
            return
        with self._lock:
            if self._kept is None:
                self._kept = self._transactions.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                yield self._kept
            except BaseException:
                self._drop()
                raise

    def _drop(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            with suppress(SQLAlchemyError):
                kept.invalidate()
            kept.close()


_EDITIONS = """
SELECT family_key, dtype, extents_key, count(*), max(id) FROM configuration
WHERE family_key {} AND dtype {} AND extents_key {} GROUP BY family_key, dtype, extents_key
"""
