"""Opening: from a URL or a path to an engine whose transactions begin and wait as the queries need it."""

import json
import os
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError, StatementError, TimeoutError

from autotuner.database.limited import limit
from autotuner.database.patience import Waiting
from autotuner.errors import DatabaseError, UnavailableError
from autotuner.settings import DATABASE_KINDS, database_url

BUSY_S = 1.0
"""How long SQLite waits for a lock by itself, deaf to signals; `Waiting.retry` asks it again."""

OPENING_S = 30.0
WRITES = {"autotuner_writes": True}
"""Execution options of a connection that reads in order to write."""

PASSING = ("database is locked", "database table is locked", "database or disk is full", "disk I/O error")
"""SQLite's words for what passes; it can be read all the while."""

LOCKED = ("40001", "40P01", "55P03", "57014")
"""PostgreSQL's codes for what one transaction did to another: serialization, deadlock, a lock, a statement too long."""

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


def make_engine(url: URL, waiting: Waiting | None = None) -> Engine:
    """Return an engine; on SQLite with WAL, foreign keys, a busy timeout, and explicit BEGIN.

    Connections of a server are checked before use, and wait for it as long as patience allows.

    `synchronous=NORMAL` does not sync at each commit: what is committed survives the death of the process, and the last
    commits may be lost, undamaged, when the machine loses power.

    Raises:
        DatabaseError: the driver of the URL is not installed.
    """
    waiting = waiting or Waiting()
    arguments: dict[str, Any] = {"json_serializer": _json}
    if is_sqlite(url):
        arguments["connect_args"] = {"timeout": BUSY_S}
    else:
        arguments |= {"pool_pre_ping": True, "pool_timeout": waiting.patience.answer_s}
    try:
        engine = create_engine(url, **arguments)
    except (ImportError, SQLAlchemyError) as error:
        raise DatabaseError(
            f"{shown(url)} needs a driver that cannot be loaded: {error}; install autotuner[postgresql]"
        ) from error
    if is_sqlite(url):
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
    elif engine.dialect.driver == "psycopg":
        limit(engine, waiting)
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


def _json(value: Any) -> str:
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
