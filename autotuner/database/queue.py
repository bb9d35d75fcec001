"""The queue in SQL: jobs and workers in the tables of the database."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, or_, select, update

from autotuner.database.contract import ATTEMPTS, Queue
from autotuner.database.lease import Leases, is_gone
from autotuner.database.retrying import retried
from autotuner.database.tables import JobRow, WorkerRow, upsert
from autotuner.database.transactions import Transactions
from autotuner.database.values import ENDED, Job, JobState, Renewal, Worker
from autotuner.errors import JobStateError, NotFoundError

JOB = [getattr(JobRow, field.name) for field in fields(Job) if field.name != "is_lost"]
WORKER = [getattr(WorkerRow, field.name) for field in fields(Worker)]

LOST_CANCELLED = "it was cancelled, and its worker was lost"
WAITING: tuple[JobState, ...] = ("queued", "running")


class SqlQueue(Queue):
    """A queue in a database. The tests of its contract are `tests/database/conformance/test_queue.py`."""

    def __init__(self, transactions: Transactions, leases: Leases) -> None:
        self._transactions, self._leases = transactions, leases

    @retried
    def enqueue(
        self,
        *,
        model: str,
        request: Mapping[str, Any],
        device_type: str,
        device_name: str | None = None,
        client: str = "",
    ) -> Job:
        with self._transactions.writing() as connection:
            return self._insert(connection, model, request, device_type, device_name, client=client)

    @retried
    def begin(self, *, model: str, request: Mapping[str, Any], device_type: str, device_name: str, worker: str) -> Job:
        with self._transactions.writing() as connection:
            self._settle(connection)
            job = self._insert(connection, model, request, device_type, device_name, attended=True)
            return self._take(connection, job.id, worker)

    @retried
    def claim(self, worker: str, device_type: str, device_name: str) -> Job | None:
        with self._transactions.writing() as connection:
            left_behind = self._settle(connection, claiming=worker)
            query = (
                select(JobRow.id)
                .where(
                    or_(JobRow.state == "queued", JobRow.id.in_(left_behind)),
                    JobRow.device_type == device_type,
                    or_(JobRow.device_name.is_(None), JobRow.device_name == device_name),
                )
                .order_by(JobRow.id)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            found = connection.execute(query).scalar_one_or_none()
            return None if found is None else self._take(connection, found, worker)

    @retried
    def renew(
        self, job_id: int, worker: str, *, progress: Mapping[str, Any] | None = None, advanced: bool = False
    ) -> Renewal:
        values: dict[str, Any] = {"lease_until": self._lease()}
        if progress is not None:
            values |= {"progress": dict(progress), "revision": JobRow.revision + 1}
        if advanced:
            values["attempts"] = 0
        statement = update(JobRow).where(_held(job_id, worker)).values(values).returning(JobRow.cancelling)
        with self._transactions.writing() as connection:
            cancelling = connection.execute(statement).scalar_one_or_none()
        if cancelling is None:
            return "lost"
        return "cancel" if cancelling else "go on"

    @retried
    def finish(
        self,
        job_id: int,
        worker: str,
        state: JobState,
        *,
        counts: Mapping[str, int] | None = None,
        configuration_id: int | None = None,
        message: str = "",
    ) -> Job:
        if state not in ENDED:
            raise JobStateError(f"job {job_id} cannot end as {state!r}: give one of {', '.join(ENDED)}")
        values = _ending(state, message) | {"counts": dict(counts or {}), "configuration_id": configuration_id}
        statement = update(JobRow).where(_held(job_id, worker)).values(values)
        with self._transactions.writing() as connection:
            if connection.execute(statement).rowcount == 0:
                found = self._job(connection, job_id)
                holder = "no worker" if found.worker is None else f"worker {found.worker}"
                raise JobStateError(f"job {job_id} is {found.state}, with {holder}: only who runs a job can end it")
            return self._job(connection, job_id)

    @retried
    def release(self, job_id: int, worker: str) -> None:
        held = _held(job_id, worker)
        put_back = {
            "state": "queued",
            "worker": None,
            "lease_until": None,
            "attempts": 0,
            "revision": JobRow.revision + 1,
        }
        with self._transactions.writing() as connection:
            query = select(JobRow.cancelling).where(held).with_for_update()
            cancelling = connection.execute(query).scalar_one_or_none()
            if cancelling:
                self._end(connection, job_id, "cancelled", "it was cancelled; what was measured is kept")
            elif cancelling is not None:
                connection.execute(update(JobRow).where(JobRow.id == job_id).values(put_back))

    @retried
    def cancel(self, job_id: int) -> Job:
        with self._transactions.writing() as connection:
            left_behind = self._settle(connection)
            found = self._job(connection, job_id, alone=True)
            if found.state == "queued":
                self._end(connection, job_id, "cancelled", "it was cancelled while it waited")
            elif job_id in left_behind:
                self._end(connection, job_id, "cancelled", LOST_CANCELLED)
            elif found.state == "running" and not found.cancelling:
                values = {"cancelling": True, "revision": JobRow.revision + 1}
                connection.execute(update(JobRow).where(JobRow.id == job_id).values(values))
            job = self._job(connection, job_id)
        if job.ended and job.state != "cancelled":
            raise JobStateError(f"job {job_id} is {job.state} already: only one that waits or runs is cancelled")
        return job

    @retried
    def job(self, job_id: int) -> Job:
        with self._transactions.reading() as connection:
            return self._job(connection, job_id)

    @retried
    def jobs(self, *, state: JobState | None = None, limit: int | None = None, before: int | None = None) -> list[Job]:
        query = select(*JOB, JobRow.lease_until).order_by(JobRow.id.desc()).limit(limit)
        if state is not None:
            query = query.where(JobRow.state == state)
        if before is not None:
            query = query.where(JobRow.id < before)
        with self._transactions.reading() as connection:
            return [_job_of(row) for row in connection.execute(query)]

    @retried
    def revisions(self, job_ids: Iterable[int]) -> dict[int, tuple[int, bool]]:
        columns = (JobRow.id, JobRow.revision, JobRow.state, JobRow.worker, JobRow.lease_until)
        query = select(*columns).where(JobRow.id.in_(list(job_ids)))
        with self._transactions.reading() as connection:
            return {row.id: (row.revision, _is_lost(row)) for row in connection.execute(query)}

    @retried
    def queued(self, client: str) -> int:
        query = select(func.count()).where(JobRow.state == "queued", JobRow.client == client)
        with self._transactions.reading() as connection:
            return connection.execute(query).scalar_one()

    @retried
    def waiting(self) -> dict[JobState, int]:
        query = (
            select(JobRow.state, func.count().label("number")).where(JobRow.state.in_(WAITING)).group_by(JobRow.state)
        )
        with self._transactions.reading() as connection:
            found = {row.state: row.number for row in connection.execute(query)}
        return {state: found.get(state, 0) for state in WAITING}

    # Workers

    @retried
    def greet(self, worker: str, device_type: str, device_name: str) -> None:
        now = datetime.now(UTC)
        values = {"name": worker, "device_type": device_type, "device_name": device_name, "started_at": now}
        with self._transactions.writing() as connection:
            seen = update(WorkerRow).where(WorkerRow.name == worker).values(seen_at=now)
            if connection.execute(seen).rowcount == 0:
                gone = [there.name for there in self._workers(connection) if self._is_gone(there)]
                connection.execute(delete(WorkerRow).where(WorkerRow.name.in_(gone)))
                connection.execute(upsert(connection, WorkerRow, ("name",)), values | {"seen_at": now})

    @retried
    def leave(self, worker: str) -> None:
        with self._transactions.writing() as connection:
            connection.execute(delete(WorkerRow).where(WorkerRow.name == worker))

    @retried
    def workers(self) -> list[Worker]:
        with self._transactions.reading() as connection:
            found = self._workers(connection)
        return [worker for worker in found if not self._is_gone(worker)]

    # Inside a transaction

    def _insert(
        self,
        connection: Connection,
        model: str,
        request: Mapping[str, Any],
        device_type: str,
        device_name: str | None,
        *,
        attended: bool = False,
        client: str = "",
    ) -> Job:
        statement = insert(JobRow).values(
            model=model, request=dict(request), device_type=device_type, device_name=device_name, attended=attended,
            state="queued", cancelling=False, attempts=0, progress={}, revision=1, counts={},
            created_at=datetime.now(UTC), message="", client=client,
        )  # fmt: skip
        return self._job(connection, connection.execute(statement.returning(JobRow.id)).scalar_one())

    def _take(self, connection: Connection, job_id: int, worker: str) -> Job:
        values = {
            "state": "running",
            "worker": worker,
            "lease_until": self._lease(),
            "started_at": func.coalesce(JobRow.started_at, datetime.now(UTC)),
            "attempts": JobRow.attempts + 1,
            "revision": JobRow.revision + 1,
        }
        connection.execute(update(JobRow).where(JobRow.id == job_id).values(values))
        return self._job(connection, job_id)

    def _settle(self, connection: Connection, claiming: str | None = None) -> list[int]:
        """End what lost its worker and is not to go on, and return the ids of what is.

        A worker that claims a job has none in hand: what it still seems to run, it could not give back. On PostgreSQL
        the jobs are locked as they were seen here; one that another transaction has in hand is left to that.
        """
        now = datetime.now(UTC)
        query = select(
            JobRow.id, JobRow.worker, JobRow.lease_until, JobRow.attended, JobRow.cancelling, JobRow.attempts
        )
        left_behind = []
        for row in connection.execute(query.where(JobRow.state == "running").order_by(JobRow.id)).all():
            given_up = row.worker == claiming and not row.attended
            if not given_up and not is_gone(row.worker, row.lease_until, now):
                continue
            as_seen = _held(row.id, row.worker) & (JobRow.lease_until == row.lease_until)
            lock = select(JobRow.id).where(as_seen).with_for_update(skip_locked=True)
            if connection.execute(lock).one_or_none() is None:
                continue
            if row.cancelling:
                self._end(connection, row.id, "cancelled", LOST_CANCELLED)
            elif row.attended:
                self._end(connection, row.id, "interrupted", "its process ended; what it measured is kept")
            elif row.attempts >= ATTEMPTS:
                message = f"its worker was lost {row.attempts} times in a row; what was measured is kept"
                self._end(connection, row.id, "failed", message)
            else:
                left_behind.append(row.id)
        return left_behind

    def _end(self, connection: Connection, job_id: int, state: JobState, message: str) -> None:
        connection.execute(update(JobRow).where(JobRow.id == job_id).values(_ending(state, message)))

    def _job(self, connection: Connection, job_id: int, *, alone: bool = False) -> Job:
        """Return a job; with `alone`, PostgreSQL keeps others from changing it until the transaction ends."""
        query = select(*JOB, JobRow.lease_until).where(JobRow.id == job_id)
        row = connection.execute(query.with_for_update() if alone else query).one_or_none()
        if row is None:
            raise NotFoundError(f"{self._transactions.shown} has no job {job_id}: `jobs` lists those that exist")
        return _job_of(row)

    @staticmethod
    def _workers(connection: Connection) -> list[Worker]:
        query = select(*WORKER).order_by(WorkerRow.started_at, WorkerRow.name)
        return [Worker(**row._mapping) for row in connection.execute(query)]

    def _lease(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._leases.job_s)

    def _is_gone(self, worker: Worker) -> bool:
        return is_gone(worker.name, worker.seen_at + timedelta(seconds=self._leases.job_s), datetime.now(UTC))


def _held(job_id: int, worker: str) -> ColumnElement[bool]:
    return (JobRow.id == job_id) & (JobRow.worker == worker) & (JobRow.state == "running")


def _job_of(row: Row[*tuple[Any, ...]]) -> Job:
    values = {name: value for name, value in row._mapping.items() if name != "lease_until"}
    return Job(**values, is_lost=_is_lost(row))


def _is_lost(row: Row[*tuple[Any, ...]]) -> bool:
    """Say whether the job in a row runs by its state, and its worker is gone as far as can be told here."""
    return row.state == "running" and is_gone(row.worker, row.lease_until, datetime.now(UTC))


def _ending(state: JobState, message: str) -> dict[str, Any]:
    """Return the changes of a job that ends now."""
    return {
        "state": state,
        "cancelling": False,
        "finished_at": datetime.now(UTC),
        "message": message,
        "lease_until": None,
        "revision": JobRow.revision + 1,
    }
