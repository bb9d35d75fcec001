"""Transactions: what every part of the database needs of its engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import SQLAlchemyError

from autotuner.database.opening import WRITES, explained, shown
from autotuner.database.tables import EnvironmentRow
from autotuner.errors import DatabaseError


class Transactions:
    """Connections in which to read or write; every error is one that says which database, and what would be valid."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def shown(self) -> str:
        """How messages name the database."""
        return shown(self.engine.url)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        try:
            with self.engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise explained(error, self.engine.url) from error

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """On SQLite the transaction holds the write lock from its start, so what it reads stays true until it ends."""
        try:
            with self.engine.connect().execution_options(**WRITES) as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise explained(error, self.engine.url) from error

    def environment_id(self, connection: Connection, key: str, *, alone: bool = False) -> int:
        """Return the number of an environment; with `alone`, PostgreSQL lets one transaction at a time pass here."""
        query = select(EnvironmentRow.id).where(EnvironmentRow.key == key)
        found = connection.execute(query.with_for_update(key_share=True) if alone else query).scalar_one_or_none()
        if found is None:
            raise DatabaseError(f"{self.shown} has no environment {key!r}: `remember` it first")
        return found
