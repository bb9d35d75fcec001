"""Locks of a PostgreSQL database: advisory locks, each of a session on a connection of its own.

The server frees them with the session. It notices a process that ends at once, and a host that is gone by TCP
keepalives, which are set on both sides, after about ten seconds. A pooler that hands one session to many clients
(pgbouncer in transaction or statement mode) breaks such locks: that is noticed by the number of the server's process.
"""

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from autotuner.database.engine import explained, make_engine
from autotuner.database.locks import Lock, LockEngine, leave_to_the_parent, number_of
from autotuner.database.retrying import Log, Retrying, Timeouts

PATIENCE_S = 10.0
LOOKING = Timeouts(answer_s=5.0, locked_s=0.0, away_s=0.0)
KEEPALIVES = {"keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
OF_SERVER = "SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3"

POOLED = "a pooler shares this session with others: connect to the server itself, or set the pooler to session mode"

SCHEMA = text("SELECT coalesce(current_schema(), '')")
TAKE = text("SELECT pg_try_advisory_lock(:number), pg_backend_pid()")
FREE = text("SELECT pg_advisory_unlock_all()")
LOOK = text("SELECT pg_backend_pid()")
HELD = text(
    "SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND granted AND "
    "objsubid = 1 AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND "
    "(classid::bigint << 32) | objid::bigint IN :numbers"
).bindparams(bindparam("numbers", expanding=True))


class SessionLock(Lock):
    """An advisory lock at the number of a name within a schema."""

    def __init__(self, engine: Engine, name: str, log: Log) -> None:
        self._engine, self._name, self._log = engine, name, log
        self._session: Connection | None = None
        self._backend: int | None = None
        self._is_whole = False

    def take(self) -> bool:
        try:
            self._session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._session.exec_driver_sql(OF_SERVER)
            number = number_of(self._session.execute(SCHEMA).scalar_one(), self._name)
            taken, self._backend = self._session.execute(TAKE, {"number": number}).one()
        except SQLAlchemyError as error:
            self.drop()
            raise explained(error, self._engine.url) from error
        self._is_whole = bool(taken)
        if not taken:
            self.drop()
        return self._is_whole

    def is_intact(self) -> bool:
        if self._session is None:
            return False
        try:
            backend = self._session.execute(LOOK).scalar_one()
        except SQLAlchemyError:
            self._is_whole = False
            return False
        if backend != self._backend:
            self._log("lock_pooled", name=self._name, error=POOLED)
        return bool(backend == self._backend)

    def drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(SQLAlchemyError):
                if self._is_whole:
                    session.execute(FREE)  # before this returns; with its session, the server frees it a moment later
            with suppress(SQLAlchemyError):
                session.invalidate()  # never handed to anybody else
            with suppress(SQLAlchemyError):
                session.close()

    def disown(self) -> None:
        if self._session is not None and not self._session.closed and not self._session.invalidated:
            leave_to_the_parent(self._session.connection.driver_connection.fileno())  # type: ignore[union-attr]


class SessionLocks(LockEngine):
    """Locks in a PostgreSQL database; they are seen over the connections that everything else uses."""

    patience_s = PATIENCE_S

    def __init__(self, engine: Engine, retrying: Retrying) -> None:
        self._engine, self._retrying = engine, retrying
        self._own: Engine | None = None

    def lock(self, name: str) -> SessionLock:
        if self._own is None:
            url, more = self._engine.url, dict[str, Any]()
            if self._engine.dialect.driver in ("psycopg", "psycopg2"):
                more["connect_args"] = {key: value for key, value in KEEPALIVES.items() if key not in url.query}
            self._own = make_engine(url, Retrying(LOOKING, self._retrying.log), poolclass=NullPool, **more)
        return SessionLock(self._own, name, self._retrying.log)

    def held(self, names: Collection[str], connection: Connection | None) -> set[str]:
        if connection is None:
            try:
                with self._engine.connect() as own:
                    return self.held(names, own)
            except SQLAlchemyError as error:
                raise explained(error, self._engine.url) from error
        schema = connection.execute(SCHEMA).scalar_one()
        numbers = {number_of(schema, name): name for name in names}
        found = connection.execute(HELD, {"numbers": list(numbers)}).scalars()
        return {numbers[number] for number in found}
