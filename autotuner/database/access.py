"""Access: everything that other rooms ask of the database, as methods that take and return values."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from sqlalchemy import Connection, Engine, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from autotuner.database.columns import (
    ENVIRONMENT,
    JOB,
    MEASUREMENT,
    call_columns,
    ending,
    environment_of,
    job_of,
    joined,
    measurement_columns,
    measurement_of,
)
from autotuner.database.job import Job, JobState
from autotuner.database.migrating import migrate
from autotuner.database.opening import WRITES, explained, make_engine, read_url, shown
from autotuner.database.tables import ConfigurationRow, EnvironmentRow, FactRow, JobRow, MeasurementRow
from autotuner.database.upserting import dialect_insert, upsert
from autotuner.errors import DatabaseError
from autotuner.records import STATUSES, Call, Environment, Measurement, Status

KEYS_PER_QUERY = 900
"""SQLite before 3.32 takes 999 parameters in a statement."""


def open_database(url_or_path: str | Path) -> "Database":
    """Open a database, and make or update its tables where they are missing or old.

    Args:
        url_or_path: path of an SQLite file, made if it is missing, or a URL (`sqlite:///FILE`, `postgresql+psycopg://...`).

    Raises:
        DatabaseError: it cannot be opened or written, is no database, is another application's, or is from a newer
            version.
    """
    url = read_url(url_or_path)
    engine = make_engine(url)
    try:
        migrate(engine)
    except SQLAlchemyError as error:
        engine.dispose()
        raise explained(error, url) from error
    except DatabaseError:
        engine.dispose()
        raise
    return Database(engine)


class Database:
    """Measurements, jobs, configurations and facts; every method is one transaction. Made by `open_database`.

    Threads may share one; processes open their own. Every method raises `DatabaseError` where the database cannot be
    read or written.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise explained(error, self._engine.url) from error

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        try:
            with self._engine.connect().execution_options(**WRITES) as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise explained(error, self._engine.url) from error

    def _environment_id(self, connection: Connection, key: str) -> int:
        found = connection.execute(select(EnvironmentRow.id).where(EnvironmentRow.key == key)).scalar_one_or_none()
        if found is None:
            raise DatabaseError(f"{shown(self._engine.url)} has no environment {key!r}: `remember` it first")
        return found

    # Environments and what was measured in them

    def remember(self, environment: Environment) -> None:
        """Store an environment; one that is known stays as it is."""
        values = {"key": environment.key, **environment.to_json()}
        with self._writing() as connection:
            connection.execute(
                dialect_insert(connection, EnvironmentRow).on_conflict_do_nothing(index_elements=["key"]), values
            )

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

    def measurements(
        self,
        *,
        environment_key: str | None = None,
        signature: str | None = None,
        kernel: str | None = None,
        kinds: Sequence[str] | None = None,
        status: Status | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[tuple[Call, Measurement]]:
        """Return what was measured, in the order of first storing, as far as every given filter agrees.

        Args:
            signature: `Call.subgraph.signature`.
            kinds: `Call.subgraph.kinds`, all of them in order.
        """
        query = select(MeasurementRow.call, *MEASUREMENT).order_by(MeasurementRow.id).limit(limit).offset(offset)
        if environment_key is not None:
            query = query.join(EnvironmentRow).where(EnvironmentRow.key == environment_key)
        if kinds is not None:
            query = query.where(MeasurementRow.kinds == joined(kinds))
        for column, value in (
            (MeasurementRow.signature, signature),
            (MeasurementRow.kernel, kernel),
            (MeasurementRow.status, status),
        ):
            if value is not None:
                query = query.where(column == value)
        with self._reading() as connection:
            return [(Call.from_json(row.call), measurement_of(row)) for row in connection.execute(query)]

    def counts(self, environment_key: str) -> dict[Status, int]:
        """Return how many calls of an environment have each status, 0 included."""
        query = (
            select(MeasurementRow.status, func.count().label("number"))
            .join(EnvironmentRow)
            .where(EnvironmentRow.key == environment_key)
            .group_by(MeasurementRow.status)
        )
        with self._reading() as connection:
            found = {row.status: row.number for row in connection.execute(query)}
        return {status: found.get(status, 0) for status in STATUSES}

    def set_fact(self, environment_key: str, name: str, value: float) -> None:
        """Store a constant of an environment, such as its noise floor, over an earlier value."""
        if not isfinite(value):
            raise DatabaseError(f"fact {name!r} is {value}: it must be finite")
        with self._writing() as connection:
            environment_id = self._environment_id(connection, environment_key)
            values = {"environment_id": environment_id, "name": name, "value": value, "measured_at": datetime.now(UTC)}
            connection.execute(upsert(connection, FactRow, ("environment_id", "name")), values)

    def facts(self, environment_key: str) -> dict[str, float]:
        """Return every measured constant of an environment, by name."""
        query = select(FactRow.name, FactRow.value).join(EnvironmentRow).where(EnvironmentRow.key == environment_key)
        with self._reading() as connection:
            return {row.name: row.value for row in connection.execute(query.order_by(FactRow.name))}

    def fact(self, environment_key: str, name: str) -> float | None:
        """Return a measured constant of an environment, or None where it was never measured."""
        return self.facts(environment_key).get(name)

    # Jobs

    def start_job(
        self, *, model: str, graph_key: str, request_key: str, request: Mapping[str, Any], environment_key: str
    ) -> int:
        """Store a job that starts now, and return its id."""
        with self._writing() as connection:
            statement = insert(JobRow).values(
                model=model,
                graph_key=graph_key,
                request_key=request_key,
                request=dict(request),
                environment_id=self._environment_id(connection, environment_key),
                state="running",
                counts={},
                started_at=datetime.now(UTC),
                message="",
            )
            return connection.execute(statement.returning(JobRow.id)).scalar_one()

    def finish_job(self, job_id: int, state: JobState, *, counts: Mapping[str, int], message: str = "") -> None:
        """Store how a running job ended.

        Raises:
            DatabaseError: there is no such job, or it has ended already; or `state` is no way to end.
        """
        ends = [name for name in get_args(JobState) if name != "running"]
        if state not in ends:
            raise DatabaseError(f"job {job_id} cannot end as {state!r}: give one of {', '.join(ends)}")
        statement = update(JobRow).where(JobRow.id == job_id, JobRow.state == "running")
        statement = statement.values(ending(state, message) | {"counts": dict(counts)})
        with self._writing() as connection:
            if connection.execute(statement).rowcount == 0:
                found = connection.execute(select(JobRow.state).where(JobRow.id == job_id)).scalar_one_or_none()
                reason = f"job {job_id} is {found} already" if found else f"there is no job {job_id}"
                raise DatabaseError(f"{shown(self._engine.url)}: {reason}; only a running job can be finished")

    def interrupt_jobs(self, environment_key: str, *, message: str) -> int:
        """Mark every job that still counts as running in an environment as interrupted, and return how many.

        A process that is killed cannot say so. Whoever holds the device's lock knows that nobody else runs a job there.
        """
        with self._writing() as connection:
            statement = update(JobRow).where(
                JobRow.state == "running", JobRow.environment_id == self._environment_id(connection, environment_key)
            )
            return connection.execute(statement.values(ending("interrupted", message))).rowcount

    def job(self, job_id: int) -> Job:
        """Return a job by its id."""
        with self._reading() as connection:
            row = connection.execute(select(*JOB).join(EnvironmentRow).where(JobRow.id == job_id)).one_or_none()
        if row is None:
            raise DatabaseError(f"{shown(self._engine.url)} has no job {job_id}: `jobs` lists those that exist")
        return job_of(row)

    def jobs(self, *, state: JobState | None = None, limit: int | None = None, offset: int = 0) -> list[Job]:
        """Return jobs, the newest first."""
        query = select(*JOB).join(EnvironmentRow).order_by(JobRow.id.desc()).limit(limit).offset(offset)
        if state is not None:
            query = query.where(JobRow.state == state)
        with self._reading() as connection:
            return [job_of(row) for row in connection.execute(query)]

    # Configurations

    def save_configuration(
        self,
        *,
        graph_key: str,
        request_key: str,
        environment_key: str,
        document: Mapping[str, Any],
        total_us: float,
        measured_us: float | None = None,
    ) -> int:
        """Store a configuration and return its id; from now on it is the answer to its request in its environment.

        Args:
            document: the configuration as JSON.
            total_us: predicted, for one step.
            measured_us: measured end to end, where it was.
        """
        with self._writing() as connection:
            statement = insert(ConfigurationRow).values(
                graph_key=graph_key,
                request_key=request_key,
                environment_id=self._environment_id(connection, environment_key),
                document=dict(document),
                total_us=total_us,
                measured_us=measured_us,
                created_at=datetime.now(UTC),
            )
            return connection.execute(statement.returning(ConfigurationRow.id)).scalar_one()

    def find_configuration(self, request_key: str, environment_key: str) -> dict[str, Any] | None:
        """Return the latest configuration for a request in an environment, or None where there is none."""
        query = (
            select(ConfigurationRow.document)
            .join(EnvironmentRow)
            .where(ConfigurationRow.request_key == request_key, EnvironmentRow.key == environment_key)
            .order_by(ConfigurationRow.id.desc())
            .limit(1)
        )
        with self._reading() as connection:
            document: dict[str, Any] | None = connection.execute(query).scalar_one_or_none()
        return document

    def configuration(self, configuration_id: int) -> dict[str, Any]:
        """Return a configuration by its id."""
        query = select(ConfigurationRow.document).where(ConfigurationRow.id == configuration_id)
        with self._reading() as connection:
            document: dict[str, Any] | None = connection.execute(query).scalar_one_or_none()
        if document is None:
            raise DatabaseError(f"{shown(self._engine.url)} has no configuration {configuration_id}")
        return document
