"""Access: everything that other rooms ask of the database, as methods that take and return values."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import ColumnElement, Engine, delete, func, select
from sqlalchemy.exc import SQLAlchemyError

from autotuner.database.columns import (
    ENVIRONMENT,
    MEASUREMENT,
    call_columns,
    environment_of,
    joined,
    measurement_columns,
    measurement_of,
)
from autotuner.database.configurations import Configurations
from autotuner.database.migrating import migrate
from autotuner.database.opening import explained, make_engine, must_exist, read_url
from autotuner.database.owner import is_gone
from autotuner.database.patience import WORKING, Log, Patience, Waiting, patient, warn
from autotuner.database.queue import JobQueue
from autotuner.database.tables import ClaimRow, EnvironmentRow, FactRow, MeasurementRow
from autotuner.database.transactions import Transactions
from autotuner.database.upserting import dialect_insert, upsert
from autotuner.errors import DatabaseError, UnavailableError
from autotuner.ir.records import STATUSES, Call, Environment, Measurement, Status

CLAIM_S = 120.0
KEYS_PER_QUERY = 900
"""SQLite before 3.32 takes 999 parameters in a statement."""


def open_database(
    url_or_path: str | Path, *, make: bool = True, patience: Patience = WORKING, log: Log = warn, reopens: bool = False
) -> "Database":
    """Open a database, and make or update its tables where they are missing or old.

    Args:
        url_or_path: path of an SQLite file, or a URL (`sqlite:///FILE`, `postgresql+psycopg://...`).
        make: make an SQLite file that is missing; otherwise that is an error, as for somebody who only reads.
        patience: how long to wait for a database that is locked or away; opening itself waits for a lock alone.
        log: called with an event and facts when such a wait begins and ends.
        reopens: go on with another SQLite file that takes the place of this one; otherwise that is an error.

    Raises:
        DatabaseError: it cannot be opened or written, is no database, is another application's, or is from a newer
            version.
    """
    url = read_url(url_or_path)
    if not make:
        must_exist(url)
    waiting = Waiting(patience, log)
    engine = make_engine(url, waiting)

    def migrated() -> None:
        try:
            migrate(engine)
        except SQLAlchemyError as error:
            raise explained(error, url) from error

    try:
        waiting.retry(migrated, away_s=0.0)
    except BaseException:
        engine.dispose()
        raise
    return Database(engine, waiting, reopens=reopens)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which measurements are meant; None for all.

    Args:
        signature: `Call.subgraph.signature`.
        kinds: `Call.subgraph.kinds`, all of them in order.
    """

    environment_key: str | None = None
    device_type: str | None = None
    signature: str | None = None
    kernel: str | None = None
    kinds: Sequence[str] | None = None
    status: Status | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        pairs = (
            (EnvironmentRow.key, self.environment_key),
            (EnvironmentRow.device_type, self.device_type),
            (MeasurementRow.signature, self.signature),
            (MeasurementRow.kernel, self.kernel),
            (MeasurementRow.kinds, None if self.kinds is None else joined(self.kinds)),
            (MeasurementRow.status, self.status),
        )
        return [column == value for column, value in pairs if value is not None]


EVERY = Filter()


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement with what was measured, where and when."""

    id: int
    environment_key: str
    call: Call
    measurement: Measurement
    measured_at: datetime


@dataclass(frozen=True, slots=True)
class Statistics:
    """How many measurements there are, by status, and the least, mean and greatest of their medians."""

    statuses: Mapping[Status, int]
    least_us: float | None
    mean_us: float | None
    greatest_us: float | None


class Database:
    """Environments, what was measured in them, and facts; every method is one transaction. Made by `open_database`.

    `queue` holds the jobs, `configurations` the answers. Threads may share one; processes open their own. Every method
    raises `DatabaseError` where the database cannot be read or written, after it was asked for as long as patience
    allows. `hurry` ends such waiting, as for a process that ends; `reopen` goes on with a file that has taken the place
    of the one that was opened.
    """

    def __init__(self, engine: Engine, waiting: Waiting, *, reopens: bool = False) -> None:
        self._transactions = Transactions(engine, waiting, reopens=reopens)
        self.hurry, self.reopen = waiting.hurry, self._transactions.reopen
        self._reading, self._writing = self._transactions.reading, self._transactions.writing
        self._environment_id = self._transactions.environment_id
        self.queue = JobQueue(self._transactions)
        self.configurations = Configurations(self._transactions)
        self._unreleased: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._transactions.engine.dispose()

    # Environments, and what was measured in them

    @patient
    def remember(self, environment: Environment) -> None:
        """Store an environment; one that is known stays as it is."""
        values = {"key": environment.key, **environment.to_json()}
        with self._writing() as connection:
            connection.execute(
                dialect_insert(connection, EnvironmentRow).on_conflict_do_nothing(index_elements=["key"]), values
            )

    @patient
    def environments(self) -> list[Environment]:
        """Return every known environment, the first one remembered first."""
        query = select(*ENVIRONMENT).order_by(EnvironmentRow.id)
        with self._reading() as connection:
            return [environment_of(row) for row in connection.execute(query)]

    def store(self, environment_key: str, results: Iterable[tuple[Call, Measurement]], *, replace: bool = False) -> int:
        """Store measurements, all or none, and return how many rows were written.

        Args:
            environment_key: of an environment that was remembered.
            results: of one call given twice, the later one counts as the newer.
            replace: also replace what was measured well; otherwise only a failure gives way to a newer measurement.
        """
        now = datetime.now(UTC)
        rows = [{**call_columns(call), **measurement_columns(m), "measured_at": now} for call, m in results]
        rows.sort(key=lambda row: row["call_key"])  # one order for every process, so that none waits in a circle
        try:
            return self._store(environment_key, rows, replace)
        except DatabaseError as error:
            if not rows:
                raise
            self._transactions.waiting.log("results_lost", number=len(rows), error=str(error))
            raise type(error)(f"{error}; {len(rows)} results that were measured are not stored") from error

    @patient
    def _store(self, environment_key: str, rows: Sequence[Mapping[str, Any]], replace: bool) -> int:
        with self._writing() as connection:
            environment_id = self._environment_id(connection, environment_key)
            if not rows:
                return 0
            statement = upsert(
                connection,
                MeasurementRow,
                ("call_key", "environment_id"),
                where=None if replace else MeasurementRow.status != "ok",
            )
            values = [{**row, "environment_id": environment_id} for row in rows]
            return connection.execute(statement, values, execution_options={"preserve_rowcount": True}).rowcount

    @patient
    def find(self, environment_key: str, call_keys: Collection[str]) -> dict[str, Measurement]:
        """Return the measurement of each call that has one in this environment, failures included, by call key."""
        keys = list(dict.fromkeys(call_keys))
        query = (
            select(MeasurementRow.call_key, *MEASUREMENT)
            .join(EnvironmentRow)
            .where(EnvironmentRow.key == environment_key)
        )
        found: dict[str, Measurement] = {}
        with self._reading() as connection:
            for start in range(0, len(keys), KEYS_PER_QUERY):
                chunk = keys[start : start + KEYS_PER_QUERY]
                for row in connection.execute(query.where(MeasurementRow.call_key.in_(chunk))):
                    found[row.call_key] = measurement_of(row)
        return found

    @patient
    def measurements(
        self, where: Filter = EVERY, *, limit: int | None = None, after: int | None = None
    ) -> list[Measured]:
        """Return what was measured, in the order of first storing; with `after`, only those with a greater id."""
        query = (
            select(
                MeasurementRow.id,
                EnvironmentRow.key.label("environment_key"),
                MeasurementRow.call,
                MeasurementRow.measured_at,
                *MEASUREMENT,
            )
            .join(EnvironmentRow)
            .where(*where.conditions())
            .order_by(MeasurementRow.id)
            .limit(limit)
        )
        if after is not None:
            query = query.where(MeasurementRow.id > after)
        with self._reading() as connection:
            return [
                Measured(row.id, row.environment_key, Call.from_json(row.call), measurement_of(row), row.measured_at)
                for row in connection.execute(query)
            ]

    @patient
    def statistics(self, where: Filter = EVERY) -> Statistics:
        """Return how many measurements there are and how long they took."""
        times = MeasurementRow.median_us
        query = select(
            MeasurementRow.status,
            func.count().label("number"),
            func.min(times).label("least"),
            func.sum(times).label("total"),
            func.max(times).label("greatest"),
        ).join(EnvironmentRow)
        with self._reading() as connection:
            rows = connection.execute(query.where(*where.conditions()).group_by(MeasurementRow.status)).all()
        numbers = {row.status: row.number for row in rows}
        ok = next((row for row in rows if row.status == "ok"), None)
        return Statistics(
            {status: numbers.get(status, 0) for status in STATUSES},
            ok.least if ok else None,
            ok.total / ok.number if ok else None,
            ok.greatest if ok else None,
        )

    # Who measures what now

    @patient
    def claim_calls(self, environment_key: str, owner: str, call_keys: Collection[str]) -> set[str]:
        """Claim calls for measuring, and return the keys of those that nobody else has claimed.

        A claim ends by `release_calls`, with its owner's process, or on another host after two minutes without being
        claimed again. Look up what is measured after claiming: whoever held a call before has stored it by then.
        """
        now = datetime.now(UTC)
        keys = sorted(set(call_keys))
        if self._unreleased:
            self._release(set(self._unreleased))
        with self._writing() as connection:
            environment_id = self._environment_id(connection, environment_key, alone=True)
            others = (ClaimRow.environment_id == environment_id) & (ClaimRow.owner != owner)
            leases = select(ClaimRow.owner, ClaimRow.lease_until).where(others).distinct()
            for holder, until in connection.execute(leases).all():
                if is_gone(holder, until, now):
                    over = (ClaimRow.owner == holder) & (ClaimRow.lease_until == until)
                    connection.execute(delete(ClaimRow).where(others, over))
            held = set(connection.scalars(select(ClaimRow.call_key).where(others)))
            mine = [key for key in keys if key not in held]
            if mine:
                until = now + timedelta(seconds=CLAIM_S)
                rows = [
                    {"environment_id": environment_id, "call_key": key, "owner": owner, "lease_until": until}
                    for key in mine
                ]
                connection.execute(upsert(connection, ClaimRow, ("environment_id", "call_key")), rows)
        return set(mine)

    def release_calls(self, owner: str) -> None:
        """End all claims of an owner; where the database is away, they end before the next ones."""
        self._unreleased.add(owner)
        try:
            self._release(set(self._unreleased))
        except UnavailableError as error:
            self._transactions.waiting.log("claims_kept", owner=owner, error=str(error))

    @patient
    def _release(self, owners: set[str]) -> None:
        with self._writing() as connection:
            connection.execute(delete(ClaimRow).where(ClaimRow.owner.in_(owners)))
        self._unreleased -= owners

    # Facts

    @patient
    def set_fact(self, environment_key: str, name: str, value: float) -> None:
        """Store a constant of an environment, such as its noise floor, over an earlier value."""
        if not isfinite(value):
            raise DatabaseError(f"fact {name!r} is {value}: it must be finite")
        with self._writing() as connection:
            environment_id = self._environment_id(connection, environment_key)
            values = {"environment_id": environment_id, "name": name, "value": value, "measured_at": datetime.now(UTC)}
            connection.execute(upsert(connection, FactRow, ("environment_id", "name")), values)

    @patient
    def facts(self, environment_key: str) -> dict[str, float]:
        """Return every measured constant of an environment, by name."""
        query = select(FactRow.name, FactRow.value).join(EnvironmentRow).where(EnvironmentRow.key == environment_key)
        with self._reading() as connection:
            return {row.name: row.value for row in connection.execute(query.order_by(FactRow.name))}

    def fact(self, environment_key: str, name: str) -> float | None:
        """Return a measured constant of an environment, or None where it was never measured."""
        return self.facts(environment_key).get(name)
