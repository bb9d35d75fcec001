"""SQLAlchemy engines, made from a URL or a path: how their connections begin a transaction, wait, and fail."""

import json
import os
import re
import sqlite3
import time
from collections.abc import Generator
from math import ceil
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError, StatementError, TimeoutError

from autotuner.database.retrying import Retrying
from autotuner.errors import DatabaseError, UnavailableError
from autotuner.extras import missing_of
from autotuner.settings import DATABASE_KINDS, database_url

GRACE_S = 0.5
"""The time of a PostgreSQL server to say itself that a statement took too long, before this side stops to wait."""

CONNECT_S = 3.0
LOOK_S = 0.1
OPENING_S = 30.0
WRITES = {"autotuner_writes": True}
"""Execution options of a connection that reads in order to write."""

PASSING = ("database is locked", "database table is locked", "database or disk is full", "disk I/O error")
"""SQLite's words for what passes; it can be read all the while."""

LOCKED = ("40001", "40P01", "55P03", "57014", "53100")
"""PostgreSQL's codes for what keeps one transaction from its end, and not the next one: serialization, deadlock, a
lock, a statement too long; a full disk, on which can be read all the while."""

SECRETS = ("password", "sslpassword")


def read_url(url_or_path: str | Path) -> URL:
    """Return the URL of a database that this product can use.

    Raises:
        DatabaseError: another kind of database, one in memory, or no URL at all.
    """
    text = database_url(url_or_path)
    valid = "give the path of an SQLite file, sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
    try:
        url = make_url(text)
    except (SQLAlchemyError, ValueError) as error:
        hidden = re.sub("(://[^:@/]*):.*@", r"\1:***@", text)
        raise DatabaseError(f"{hidden!r} is no database URL: {valid}") from error
    if url.get_backend_name() not in DATABASE_KINDS or (is_sqlite(url) and url.host):
        raise DatabaseError(f"{shown(url)} is no database that can be used: {valid}")
    if is_sqlite(url) and url.database in (None, "", ":memory:"):
        raise DatabaseError(f"{shown(url)} names no file, so nothing measured would be kept: {valid}")
    return url


def is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def must_exist(url: URL) -> None:
    """Check that there is a file, where the database is one.

    Raises:
        DatabaseError: there is none.
    """
    file = Path(str(url.database))
    if is_sqlite(url) and file.absolute().parent.is_dir() and not file.exists():
        raise DatabaseError(f"there is no {shown(url)}: give one that `autotuner tune` or a worker has written")


def shown(url: URL) -> str:
    """Return how messages name a database: the file of an SQLite one, the URL without password of another."""
    if is_sqlite(url) and url.database:
        return f"database {url.database}"
    secret = {name: "***" for name in SECRETS if name in url.query}
    return f"database {url.update_query_dict(secret).render_as_string(hide_password=True)}"


def make_engine(url: URL, retrying: Retrying | None = None, **more: Any) -> Engine:
    """Return an engine; on SQLite with WAL, foreign keys, a busy timeout, and explicit BEGIN.

    Connections of a server are checked before use, and wait for it as long as the timeouts allow.

    `synchronous=NORMAL` does not sync at each commit: what is committed survives the death of the process, and the last
    commits may be lost, undamaged, when the machine loses power.

    Args:
        more: arguments of `sqlalchemy.create_engine`; with a `poolclass`, connections are not checked before use.

    Raises:
        MissingError: psycopg is not installed.
        DatabaseError: the driver of the URL cannot be loaded.
    """
    retrying = retrying or Retrying()
    arguments: dict[str, Any] = {"json_serializer": json_text, **more}
    if is_sqlite(url):
        arguments["connect_args"] = {"timeout": retrying.timeouts.busy_s}
    elif "poolclass" not in more:
        arguments |= {"pool_pre_ping": True, "pool_timeout": retrying.timeouts.answer_s}
    try:
        engine = create_engine(url, **arguments)
    except (ImportError, SQLAlchemyError) as error:
        missing = missing_of(shown(url), error) if isinstance(error, ImportError) else None
        raise missing or DatabaseError(f"{shown(url)} needs a driver that cannot be loaded: {error}") from error
    if is_sqlite(url):
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
    elif engine.dialect.driver == "psycopg":
        _limit(engine, retrying)
    return engine


def explained(error: SQLAlchemyError, url: URL) -> DatabaseError:
    """Return the error that a user gets: which database, what was wrong, and what would be valid.

    It is an `UnavailableError` where the same may be possible later.
    """
    original = error.orig if isinstance(error, StatementError) else None
    if isinstance(original, DatabaseError):
        return original
    cause = str(original or error).strip()
    reason = _sqlite_reason(cause, Path(str(url.database))) if is_sqlite(url) else None
    sentence = f"{shown(url)} {reason or 'refused: ' + cause}"
    if is_sqlite(url):
        passing = locked = cause.startswith(PASSING)
    else:
        state = getattr(original, "sqlstate", None)
        passing, locked = isinstance(error, OperationalError | InterfaceError | TimeoutError), state in LOCKED
    return UnavailableError(sentence, locked=locked) if passing else DatabaseError(sentence)


def _sqlite_reason(cause: str, file: Path) -> str | None:
    directory = file.absolute().parent
    if file.is_dir():
        return f"is a directory: give a file in it, such as {file / 'autotuner.sqlite'}"
    if not directory.is_dir():
        return f"cannot be made, there is no directory {directory}: make it, or give a file in one that exists"
    if "not a database" in cause or "malformed" in cause:
        return f"is damaged or no SQLite file ({cause}): give another path, or an SQLite file"
    if "unable to open" in cause or "readonly" in cause:
        return f"cannot be written ({cause}): give a file that can be written, in a directory that can be written"
    if "locked" in cause:
        return f"is locked by another process ({cause}): end that process, or give another file"
    return None


def json_text(value: Any) -> str:
    """Return a value as the database keeps it.

    Raises:
        DatabaseError: it is none of JSON.
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DatabaseError(f"a {type(value).__name__} cannot be stored as JSON: {error}") from error


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver would begin late and only before some statements: see `_begin`
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA synchronous=NORMAL")
    give_up_s = time.monotonic() + OPENING_S
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                connection.execute("PRAGMA journal_mode=WAL")  # stays as it is where shared memory is not to be had
            return
        except sqlite3.OperationalError as error:
            # Switching raises a read lock to a write lock, where SQLite does not wait for another writer: of four
            # processes that open one new file in the same moment, up to 7 % are refused (SQLite 3.40).
            if "locked" not in str(error) or time.monotonic() > give_up_s:
                raise
            time.sleep(0.01 + 0.01 * (os.getpid() % 7))


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("autotuner_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _limit(engine: Engine, retrying: Retrying) -> None:
    """Have an engine of psycopg make connections that give up a server which accepts them and then says nothing.

    The server's own `statement_timeout` ends a statement that takes too long. A server that hangs, or that the network
    has swallowed, does not end it: so this side stops to wait as well.
    """
    from psycopg import Connection, OperationalError, waiting

    class Limited(Connection):  # type: ignore[misc]  # psycopg need not be installed where types are checked
        answer_s: float | None = retrying.timeouts.answer_s

        def wait(self, generator: Generator[Any, Any, Any], interval: float = LOOK_S, **named: Any) -> Any:
            try:
                return waiting.wait(self._limited(generator), self.pgconn.socket, interval=interval, **named)
            except (KeyboardInterrupt, SystemExit):
                self.pgconn.finish()  # psycopg's own would first ask the server to cancel, and wait for that
                raise

        def _limited(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
            """Pass on what a generator waits for, and end it when its time is up; psycopg looks in every `interval`."""
            began = time.monotonic()
            try:
                wanted = next(generator)
                while True:
                    ready = yield wanted
                    if not ready and self.answer_s is not None:
                        waited_s = time.monotonic() - began
                        if retrying.left_s(self.answer_s + GRACE_S - waited_s) <= 0:
                            generator.close()
                            self.pgconn.finish()
                            raise OperationalError(f"the server did not answer for {waited_s:.0f} s")
                    wanted = generator.send(ready)
            except StopIteration as end:
                return end.value

    def connect(_dialect: object, _record: object, arguments: list[Any], named: dict[str, Any]) -> Limited:
        left_s = retrying.left_s(CONNECT_S)
        if left_s <= 0:
            raise OperationalError("no connection is made any more: the process ends")
        named.setdefault("connect_timeout", ceil(left_s))  # psycopg waits for 2 s at least
        connection: Limited = Limited.connect(*arguments, **named)
        answer_ms = ceil(1e3 * retrying.timeouts.answer_s)
        connection.execute(f"SET statement_timeout = {answer_ms}")
        connection.commit()
        return connection

    event.listen(engine, "do_connect", connect)


def unlimited(driver_connection: object) -> None:
    """Let a limited connection take its time from now on, as a migration may."""
    if hasattr(driver_connection, "answer_s"):
        driver_connection.answer_s = None
