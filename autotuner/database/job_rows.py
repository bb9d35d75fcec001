"""Rows of jobs: what one transaction does to them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from sqlalchemy import JSON, ColumnElement, Connection, Row, case, func, select, text, type_coerce, update

from autotuner.database.contract import ATTEMPTS
from autotuner.database.engine import json_text
from autotuner.database.locks import Locks, number_of
from autotuner.database.tables import JobRow, insert_into
from autotuner.database.values import Job, JobState
from autotuner.errors import NotFoundError

COMPUTED = ("is_lost", "is_new", "waits_for")
NAMES = [field.name for field in fields(Job) if field.name not in COMPUTED]
KEYED = [*(getattr(JobRow, name) for name in NAMES), JobRow.request_key]
BRIEF = [
    type_coerce(case((JobRow.summary.is_(None), JobRow.request), else_=None), JSON).label("request")
    if column is JobRow.request else column for column in KEYED
]  # fmt: skip
"""As `KEYED`, without the requests of jobs that have a summary."""

RUNS = (JobRow.state == "running") & JobRow.attended.is_(False)
TAKES = text("SELECT pg_try_advisory_xact_lock(:number)")
KEPT_BYTES = 2**14
"""Of a job that has ended, a larger request is dropped where there is a summary: nobody runs it again."""

LOST_CANCELLED = "it was cancelled, and its worker was lost"


class JobRows:
    """Jobs in the tables of a database; each method is part of a transaction.

    Args:
        locks: of the runners.
        shown: what people are told is the database.
    """

    def __init__(self, locks: Locks, shown: str) -> None:
        self._locks, self._shown = locks, shown

    def insert(self, connection: Connection, **asked: Any) -> int | None:
        """Store a job and return its id; None where its idempotency key is that of another."""
        key, number_of_bytes = written(asked["request"])
        started = {
            "attended": False, "state": "queued", "cancelling": False, "attempt": 0, "losses": 0, "priority": 0,
            "progress": {}, "revision": 1, "counts": {}, "created_at": datetime.now(UTC), "message": "",
            "client": "", "request_key": key, "request_bytes": number_of_bytes,
        }  # fmt: skip
        statement = insert_into(connection, JobRow).on_conflict_do_nothing(index_elements=["client", "idempotency_key"])
        return connection.execute(statement.values(started | asked).returning(JobRow.id)).scalar_one_or_none()

    def take(self, connection: Connection, job_id: int, runner: str, *, lost: bool = False) -> Job:
        """Have a runner take a job; `lost` counts that the one before has lost it."""
        values = {
            "state": "running",
            "worker": runner,
            "started_at": func.coalesce(JobRow.started_at, datetime.now(UTC)),
            "attempt": JobRow.attempt + 1,
            "losses": JobRow.losses + (1 if lost else 0),
            "revision": JobRow.revision + 1,
        }
        connection.execute(update(JobRow).where(JobRow.id == job_id).values(values))
        return self.job(connection, job_id)

    @staticmethod
    def is_alone(connection: Connection, request_key: str) -> bool:
        """Say whether no other transaction takes an equal job in this moment, or has just taken one.

        On SQLite a transaction that writes is alone anyway.
        """
        if connection.dialect.name != "postgresql":
            return True
        schema = connection.execute(text("SELECT coalesce(current_schema(), '')")).scalar_one()
        if not connection.execute(TAKES, {"number": number_of(schema, "request", request_key)}).scalar_one():
            return False
        runs = select(JobRow.id).where(RUNS, JobRow.request_key == request_key).limit(1)
        return connection.execute(runs).one_or_none() is None

    def settle(self, connection: Connection, claiming: str | None = None, in_hand: Collection[int] = ()) -> list[int]:
        """End what lost its runner and is not to go on, and return the ids of what is.

        On PostgreSQL the jobs are locked as they were seen here; one that another transaction has in hand is left to
        that.
        """
        query = select(
            JobRow.id, JobRow.state, JobRow.worker, JobRow.attempt, JobRow.attended, JobRow.cancelling, JobRow.losses
        )
        rows = connection.execute(query.where(JobRow.state == "running").order_by(JobRow.id)).all()
        gone = self.gone(connection, rows)
        left_behind = []
        for row in rows:
            given_up_on = row.worker == claiming and not row.attended and row.id not in in_hand
            if not given_up_on and (row.worker not in gone or row.worker == claiming):
                continue
            lock = select(JobRow.id).where(held(row.id, row.attempt)).with_for_update(skip_locked=True)
            if connection.execute(lock).one_or_none() is None:
                continue
            if row.cancelling:
                self.end(connection, row.id, "cancelled", LOST_CANCELLED)
            elif row.attended:
                self.end(connection, row.id, "interrupted", "its process ended; what it measured is kept")
            elif row.losses + 1 >= ATTEMPTS:
                self.end(connection, row.id, "failed", given_up(row.losses + 1))
            else:
                left_behind.append(row.id)
        return left_behind

    def gone(self, connection: Connection, rows: Iterable[Row[*tuple[Any, ...]]]) -> set[str]:
        """Return the names of runners that are gone, of those that have a job in these rows."""
        return self._locks.gone({row.worker for row in rows if row.state == "running"}, connection)

    def jobs(self, connection: Connection, rows: Collection[Row[*tuple[Any, ...]]]) -> list[Job]:
        gone = self.gone(connection, rows)
        ahead: Sequence[Row[*tuple[Any, ...]]] = ()
        if any(row.state == "queued" for row in rows):
            ahead = connection.execute(select(JobRow.id, JobRow.request_key).where(RUNS).order_by(JobRow.id)).all()
        first = {row.request_key: row.id for row in reversed(ahead)}
        return [
            Job(
                **{name: row._mapping[name] for name in NAMES} | {"request": row.request or {}},
                is_lost=row.state == "running" and row.worker in gone,
                waits_for=first.get(row.request_key) if row.state == "queued" else None,
            )
            for row in rows
        ]

    def end(self, connection: Connection, job_id: int, state: JobState, message: str) -> None:
        """Store how a job ends now."""
        connection.execute(update(JobRow).where(JobRow.id == job_id).values(ending(state, message)))
        self.drop_request(connection, job_id)

    @staticmethod
    def drop_request(connection: Connection, job_id: int) -> None:
        """Drop the request of a job that has ended, if it is large and there is a summary."""
        large = (JobRow.id == job_id) & (JobRow.request_bytes > KEPT_BYTES) & JobRow.summary.is_not(None)
        connection.execute(update(JobRow).where(large).values(request={}))

    def job(self, connection: Connection, job_id: int, *, alone: bool = False) -> Job:
        """Return a job; with `alone`, PostgreSQL keeps others from changing it until the transaction ends."""
        query = select(*KEYED).where(JobRow.id == job_id)
        row = connection.execute(query.with_for_update() if alone else query).one_or_none()
        if row is None:
            raise NotFoundError(f"{self._shown} has no job {job_id}: `jobs` lists those that exist")
        return self.jobs(connection, [row])[0]


def written(request: Mapping[str, Any]) -> tuple[str, int]:
    """Return the key of a request, and the bytes that it takes: equal requests are written alike."""
    text = json_text(request).encode()
    return sha256(text).hexdigest(), len(text)


def held(job_id: int, attempt: int) -> ColumnElement[bool]:
    """Return what holds of a job that this attempt has."""
    return (JobRow.id == job_id) & (JobRow.attempt == attempt) & (JobRow.state == "running")


def given_up(losses: int) -> str:
    """Return why a job has failed whose workers were lost."""
    return f"its worker was lost {losses} times in a row; what was measured is kept"


def ending(state: JobState, message: str) -> dict[str, Any]:
    """Return the changes of a job that ends now."""
    return {
        "state": state,
        "cancelling": False,
        "finished_at": datetime.now(UTC),
        "message": message,
        "revision": JobRow.revision + 1,
    }
