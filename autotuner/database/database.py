"""The database: measurements and facts in SQL, with the queue and the configurations beside them."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import ColumnElement, Engine, Row, func, select
from sqlalchemy.exc import SQLAlchemyError

from autotuner.database.backlog import Backlog
from autotuner.database.configurations import SqlConfigurations
from autotuner.database.contract import Storage
from autotuner.database.engine import explained, is_sqlite, make_engine, must_exist, read_url
from autotuner.database.file_locks import FileLocks
from autotuner.database.gpus import SqlGpus
from autotuner.database.inventory import SqlInventory
from autotuner.database.locks import Locks
from autotuner.database.migrations import HEAD, migrate
from autotuner.database.pruning import SqlPruning
from autotuner.database.queue import SqlQueue
from autotuner.database.retrying import WORKING, Log, Retrying, Timeouts, retried, warn
from autotuner.database.session_locks import SessionLocks
from autotuner.database.tables import EnvironmentRow, FactRow, MeasurementRow, insert_into, upsert
from autotuner.database.tokens import SqlTokens
from autotuner.database.transactions import Transactions
from autotuner.database.values import EVERY, Filter, Statistics, StoredMeasurement
from autotuner.errors import DatabaseError
from autotuner.ir.records import STATUSES, Call, Environment, Measurement, Subgraph

KEYS_PER_QUERY = 900
"""SQLite before 3.32 takes 999 parameters in a statement."""

MEASUREMENT = {field.name: getattr(MeasurementRow, field.name) for field in fields(Measurement)}


def open_database(
    url_or_path: str | Path,
    *,
    make: bool = True,
    timeouts: Timeouts = WORKING,
    log: Log = warn,
    reopens: bool = False,
    upgrades: bool | None = None,
) -> "Database":
    """Open a database, and make or update its tables where they are missing or old.

    Args:
        url_or_path: path of an SQLite file, or a URL (`sqlite:///FILE`, `postgresql+psycopg://...`).
        make: make an SQLite file that is missing; otherwise that is an error, as for somebody who only reads.
        timeouts: for a database that is locked or away; opening itself waits for a lock alone.
        log: called with an event and facts when such a wait begins and ends.
        reopens: go on with another SQLite file that takes the place of this one; otherwise that is an error.
        upgrades: update tables of an earlier version; by default only those of an SQLite file, as processes of an
            earlier version may work on a server.

    Raises:
        DatabaseError: it cannot be opened or written, is no database, is another application's, or is from a newer
            version.
    """
    url = read_url(url_or_path)
    if not make:
        must_exist(url)
    retrying = Retrying(timeouts, log)
    engine = make_engine(url, retrying)

    def migrated() -> None:
        try:
            migrate(engine, upgrades=is_sqlite(url) if upgrades is None else upgrades)
        except SQLAlchemyError as error:
            raise explained(error, url) from error

    try:
        retrying.call(migrated, away_s=0.0)
    except BaseException:
        engine.dispose()
        raise
    return Database(engine, retrying, reopens=reopens)


def upgraded(url_or_path: str | Path) -> tuple[str | None, str]:
    """Bring the tables of a database up to date, and return the migrations that they were and are at.

    Raises:
        DatabaseError: as `open_database`; also where there is no such SQLite file.
    """
    url = read_url(url_or_path)
    must_exist(url)
    engine = make_engine(url)
    try:
        return migrate(engine), HEAD
    except SQLAlchemyError as error:
        raise explained(error, url) from error
    finally:
        engine.dispose()


class Database(Storage):
    """Storage and queue in a database, made by `open_database`. The methods of the contract are described there.

    A database that is locked or away is asked again up to the timeouts. `hurry` ends such retries, as for a process
    that ends; `reopen` goes on with a file that has taken the place of the one that was opened.
    """

    def __init__(self, engine: Engine, retrying: Retrying, *, reopens: bool = False) -> None:
        self._transactions = Transactions(engine, retrying, reopens=reopens)
        self.hurry, self.reopen = retrying.hurry, self._transactions.reopen
        self._reading, self._writing = self._transactions.reading, self._transactions.writing
        self._environment_id = self._transactions.environment_id
        self.space = self._transactions.space
        locks = FileLocks(str(engine.url.database)) if is_sqlite(engine.url) else SessionLocks(engine, retrying)
        self.locks = Locks(locks, retrying)
        self.queue = SqlQueue(self._transactions, self.locks)
        self.configurations = SqlConfigurations(self._transactions)
        self._behind = threading.local()
        self.inventory = SqlInventory(self._transactions)
        self.pruning = SqlPruning(self._transactions)
        self.tokens = SqlTokens(self._transactions)
        self.gpus = SqlGpus(self._transactions, self.locks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """The number of SQLite files that took the place of the one that was opened first: ids start anew in each."""
        return self._transactions.generation

    def close(self) -> None:
        self._transactions.close()

    # Environments and measurements

    @retried
    def remember(self, environment: Environment) -> None:
        values = {"key": environment.key, **environment.to_json()}
        with self._writing() as connection:
            insert = insert_into(connection, EnvironmentRow).on_conflict_do_nothing(index_elements=["key"])
            connection.execute(insert, values)

    @retried
    def environments(self) -> list[Environment]:
        query = select(
            EnvironmentRow.device_type, EnvironmentRow.device_name, EnvironmentRow.facts, EnvironmentRow.policy
        ).order_by(EnvironmentRow.id)
        with self._reading() as connection:
            return [
                Environment(device_type, device_name, tuple(facts.items()), tuple(policy.items()))
                for device_type, device_name, facts, policy in connection.execute(query)
            ]

    def store(self, environment_key: str, results: Iterable[tuple[Call, Measurement]], *, replace: bool = False) -> int:
        backlog = self._backlog()
        if backlog is not None:
            return backlog.put(environment_key, results, replace=replace)
        results = list(results)
        try:
            return self._store_all(environment_key, results, replace)
        except DatabaseError as error:
            if not results:
                raise
            raise type(error)(f"{error}; {len(results)} results that were measured are not stored") from error

    @contextmanager
    def writing_behind(self) -> Iterator[None]:
        """Have what this thread stores inside wait in memory while the database is away; all is stored at the end.

        Meanwhile `find` returns what waits; once something was stored, it does not wait for the database either.

        Raises:
            DatabaseError: something could not be stored, by an inner `store` or at the end.
        """
        self._behind.backlog = backlog = Backlog(self._store_all, self._transactions.retrying)
        try:
            yield
        finally:
            self._behind.backlog = None
            backlog.close()

    def _backlog(self) -> Backlog | None:
        return getattr(self._behind, "backlog", None)

    def _store_all(self, environment_key: str, results: Iterable[tuple[Call, Measurement]], replace: bool) -> int:
        now = datetime.now(UTC)
        rows = [{**_call_columns(call), **measurement.to_json(), "measured_at": now} for call, measurement in results]
        rows.sort(key=lambda row: row["call_key"])  # one order for every process, so that none waits in a circle
        try:
            return self._store(environment_key, rows, replace)
        except DatabaseError as error:
            if rows:
                self._transactions.retrying.log("results_lost", number=len(rows), error=str(error))
            raise

    @retried
    def _store(self, environment_key: str, rows: Sequence[Mapping[str, Any]], replace: bool) -> int:
        with self._writing() as connection:
            environment_id = self._environment_id(connection, environment_key)
            if not rows:
                return 0
            replaced = None if replace else MeasurementRow.status != "ok"
            statement = upsert(connection, MeasurementRow, ("call_key", "environment_id"), where=replaced)
            values = [{**row, "environment_id": environment_id} for row in rows]
            return connection.execute(statement, values, execution_options={"preserve_rowcount": True}).rowcount

    def find(self, environment_key: str, call_keys: Collection[str]) -> dict[str, Measurement]:
        keys = list(dict.fromkeys(call_keys))
        backlog, retrying = self._backlog(), self._transactions.retrying
        if backlog is None:
            return retrying.call(lambda: self._find(environment_key, keys))
        found = backlog.looked_up(
            environment_key, lambda away_s: retrying.call(lambda: self._find(environment_key, keys), away_s=away_s)
        )
        return {key: found[key] for key in keys if key in found}

    def _find(self, environment_key: str, keys: Sequence[str]) -> dict[str, Measurement]:
        query = select(MeasurementRow.call_key, *MEASUREMENT.values()).join(EnvironmentRow)
        query = query.where(EnvironmentRow.key == environment_key)
        found: dict[str, Measurement] = {}
        with self._reading() as connection:
            for start in range(0, len(keys), KEYS_PER_QUERY):
                chunk = keys[start : start + KEYS_PER_QUERY]
                for row in connection.execute(query.where(MeasurementRow.call_key.in_(chunk))):
                    found[row.call_key] = _measurement_of(row)
        return found

    @retried
    def measurements(
        self, where: Filter = EVERY, *, limit: int | None = None, after: int | None = None
    ) -> list[StoredMeasurement]:
        query = (
            select(
                MeasurementRow.id,
                EnvironmentRow.key.label("environment_key"),
                MeasurementRow.call,
                MeasurementRow.measured_at,
                *MEASUREMENT.values(),
            )
            .join(EnvironmentRow)
            .where(*_conditions(where))
            .order_by(MeasurementRow.id)
            .limit(limit)
        )
        if after is not None:
            query = query.where(MeasurementRow.id > after)
        with self._reading() as connection:
            return [
                StoredMeasurement(
                    row.id, row.environment_key, Call.from_json(row.call), _measurement_of(row), row.measured_at
                )
                for row in connection.execute(query)
            ]

    @retried
    def times(self, environment_key: str, signatures: Collection[str]) -> list[tuple[Call, float]]:
        query = select(MeasurementRow.id, MeasurementRow.call, MeasurementRow.median_us).join(EnvironmentRow)
        query = query.where(EnvironmentRow.key == environment_key, MeasurementRow.status == "ok")
        wanted, found = sorted(signatures), list[Any]()
        with self._reading() as connection:
            for start in range(0, len(wanted), KEYS_PER_QUERY):
                chunk = wanted[start : start + KEYS_PER_QUERY]
                found += connection.execute(query.where(MeasurementRow.signature.in_(chunk))).all()
        return [(Call.from_json(row.call), row.median_us) for row in sorted(found, key=lambda row: row.id)]

    @retried
    def subgraphs(self, environment_key: str) -> list[Subgraph]:
        first = (
            select(func.min(MeasurementRow.id))
            .join(EnvironmentRow)
            .where(EnvironmentRow.key == environment_key)
            .group_by(MeasurementRow.signature)
        )
        query = select(MeasurementRow.call).where(MeasurementRow.id.in_(first)).order_by(MeasurementRow.id)
        with self._reading() as connection:
            return [Call.from_json(call).subgraph for call in connection.scalars(query)]

    @retried
    def statistics(self, where: Filter = EVERY) -> Statistics:
        times = MeasurementRow.median_us
        query = select(
            MeasurementRow.status,
            func.count().label("number"),
            func.min(times).label("least"),
            func.sum(times).label("total"),
            func.max(times).label("greatest"),
        ).join(EnvironmentRow)
        with self._reading() as connection:
            rows = connection.execute(query.where(*_conditions(where)).group_by(MeasurementRow.status)).all()
        numbers = {row.status: row.number for row in rows}
        ok = next((row for row in rows if row.status == "ok"), None)
        return Statistics(
            {status: numbers.get(status, 0) for status in STATUSES},
            ok.least if ok else None,
            ok.total / ok.number if ok else None,
            ok.greatest if ok else None,
        )

    # Facts

    @retried
    def set_fact(self, environment_key: str, name: str, value: float) -> None:
        if not isfinite(value):
            raise DatabaseError(f"fact {name!r} is {value}: it must be finite")
        with self._writing() as connection:
            environment_id = self._environment_id(connection, environment_key)
            values = {"environment_id": environment_id, "name": name, "value": value, "measured_at": datetime.now(UTC)}
            connection.execute(upsert(connection, FactRow, ("environment_id", "name")), values)

    @retried
    def facts(self, environment_key: str) -> dict[str, float]:
        query = select(FactRow.name, FactRow.value).join(EnvironmentRow).where(EnvironmentRow.key == environment_key)
        with self._reading() as connection:
            return {row.name: row.value for row in connection.execute(query.order_by(FactRow.name))}

    def fact(self, environment_key: str, name: str) -> float | None:
        return self.facts(environment_key).get(name)


def _conditions(where: Filter) -> list[ColumnElement[bool]]:
    pairs = (
        (EnvironmentRow.key, where.environment_key),
        (EnvironmentRow.device_type, where.device_type),
        (MeasurementRow.signature, where.signature),
        (MeasurementRow.kernel, where.kernel),
        (MeasurementRow.kinds, None if where.kinds is None else _joined(where.kinds)),
        (MeasurementRow.status, where.status),
    )
    return [column == value for column, value in pairs if value is not None]


def _call_columns(call: Call) -> dict[str, Any]:
    return {
        "call_key": call.key,
        "signature": call.subgraph.signature,
        "kernel": call.candidate.kernel,
        "kinds": _joined(call.subgraph.kinds),
        "call": call.to_json(),
    }


def _joined(kinds: Sequence[str]) -> str:
    return "+".join(kinds)


def _measurement_of(row: Row[*tuple[Any, ...]]) -> Measurement:
    return Measurement.from_json({name: row._mapping[name] for name in MEASUREMENT})
