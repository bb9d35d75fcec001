"""The queue in SQL: jobs and workers in the tables of the database."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    delete,
    func,
    or_,
    select,
    text,
    type_coerce,
    update,
)

from autotuner.database.contract import ATTEMPTS, Device, Queue
from autotuner.database.engine import json_text
from autotuner.database.locks import Locks, number_of
from autotuner.database.retrying import retried
from autotuner.database.tables import JobRow, WorkerRow, insert_into
from autotuner.database.transactions import Transactions
from autotuner.database.values import ENDED, Answer, Job, JobState, Worker
from autotuner.errors import JobStateError, KeyReusedError, NotFoundError

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
ASKED = ("model", "request", "device_type", "device_name", "priority")
KEPT_BYTES = 2**14
"""Of a job that has ended, a larger request is dropped where there is a summary: nobody runs it again."""

ROW_BYTES = 2**10
"""Size of a job beside its request, about."""

SIZE = JobRow.request_bytes + ROW_BYTES
WORKER = [getattr(WorkerRow, field.name) for field in fields(Worker)]

LOST_CANCELLED = "it was cancelled, and its worker was lost"
WAITING: tuple[JobState, ...] = ("queued", "running")


class SqlQueue(Queue):
    """A queue in a database. The tests of its contract are `tests/database/conformance/test_queue.py`."""

    def __init__(self, transactions: Transactions, locks: Locks) -> None:
        self._transactions, self._locks = transactions, locks

    @retried
    def enqueue(
        self,
        *,
        model: str,
        request: Mapping[str, Any],
        device_type: str,
        device_name: str | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        client: str = "",
        summary: Mapping[str, Any] | None = None,
    ) -> Job:
        asked = {
            "model": model, "request": dict(request), "device_type": device_type, "device_name": device_name,
            "priority": priority,
        }  # fmt: skip
        with self._transactions.writing() as connection:
            job_id = self._insert(connection, idempotency_key=idempotency_key, client=client, summary=summary, **asked)
            if job_id is not None:
                return replace(self._job(connection, job_id), is_new=True)
            columns = (JobRow.id, JobRow.request_key)
            there = select(*columns).where(JobRow.client == client, JobRow.idempotency_key == idempotency_key)
            found = connection.execute(there).one()
            job = self._job(connection, found.id)
        asked["request"] = json.loads(json.dumps(asked["request"]))
        differs = [name for name in ASKED if getattr(job, name) != asked[name]]
        if found.request_key == _written(request)[0]:
            differs = [name for name in differs if name != "request"]
        if differs:
            raise KeyReusedError(
                f"the idempotency key {idempotency_key!r} is that of job {job.id}, which differs in "
                f"{', '.join(differs)}: give another request another key"
            )
        return job

    @retried
    def has_key(self, client: str, idempotency_key: str) -> bool:
        query = select(JobRow.id).where(JobRow.client == client, JobRow.idempotency_key == idempotency_key)
        with self._transactions.reading() as connection:
            return connection.execute(query).scalar_one_or_none() is not None

    def begin(
        self,
        *,
        model: str,
        request: Mapping[str, Any],
        device_type: str,
        device_name: str,
        runner: str,
        summary: Mapping[str, Any] | None = None,
    ) -> Job:
        asked = {
            "model": model, "request": dict(request), "device_type": device_type, "device_name": device_name,
            "summary": summary,
        }  # fmt: skip
        return self._begin(runner, f"begun {uuid4().hex}", asked)

    @retried
    def _begin(self, runner: str, key: str, asked: Mapping[str, Any]) -> Job:
        """Store a job and take it, once under this key: of a transaction that took effect, the answer may be lost."""
        with self._transactions.writing() as connection:
            self._settle(connection)
            job_id = self._insert(connection, idempotency_key=key, attended=True, **asked)
            if job_id is not None:
                return self._take(connection, job_id, runner)
            there = select(JobRow.id).where(JobRow.client == "", JobRow.idempotency_key == key)
            return self._job(connection, connection.execute(there).scalar_one())

    @retried
    def claim(
        self, runner: str, devices: Iterable[Device], *, limit: int = 1, in_hand: Collection[int] = ()
    ) -> list[Job]:
        fits = [
            and_(JobRow.device_type == kind, or_(JobRow.device_name.is_(None), JobRow.device_name == name))
            for kind, name in devices
        ]
        with self._transactions.writing() as connection:
            left_behind = self._settle(connection, runner, in_hand)
            busy = list(connection.execute(select(JobRow.request_key).where(RUNS)).scalars())
            taken: list[Job] = []
            while len(taken) < limit:
                waiting = (JobRow.state == "queued") & JobRow.request_key.not_in(busy)
                query = (
                    select(JobRow.id, JobRow.request_key)
                    .where(or_(waiting, JobRow.id.in_(left_behind)), or_(False, *fits))
                    .order_by(JobRow.priority.desc(), JobRow.id)
                    .limit(1)
                    .with_for_update(skip_locked=True)
                )
                found = connection.execute(query).one_or_none()
                if found is None:
                    break
                lost = found.id in left_behind
                if lost or self._is_alone(connection, found.request_key):
                    taken.append(self._take(connection, found.id, runner, lost=lost))
                left_behind = [job_id for job_id in left_behind if job_id != found.id]
                busy.append(found.request_key)
            return taken

    @retried
    def running(self, runner: str) -> list[Job]:
        query = select(*KEYED).where(JobRow.state == "running", JobRow.worker == runner).order_by(JobRow.id)
        with self._transactions.reading() as connection:
            return self._jobs(connection, connection.execute(query).all())

    @retried
    def report(
        self, job_id: int, attempt: int, *, progress: Mapping[str, Any] | None = None, advanced: bool = False
    ) -> Answer:
        values: dict[str, Any] = {}
        if progress is not None:
            values |= {"progress": dict(progress), "revision": JobRow.revision + 1}
        if advanced:
            values["losses"] = 0
        held = _held(job_id, attempt)
        if values:
            statement = update(JobRow).where(held).values(values).returning(JobRow.cancelling)
            with self._transactions.writing() as connection:
                cancelling = connection.execute(statement).scalar_one_or_none()
        else:
            with self._transactions.reading() as connection:
                cancelling = connection.execute(select(JobRow.cancelling).where(held)).scalar_one_or_none()
        if cancelling is None:
            return "lost"
        return "cancel" if cancelling else "go on"

    @retried
    def finish(
        self,
        job_id: int,
        attempt: int,
        state: JobState,
        *,
        counts: Mapping[str, int] | None = None,
        configuration_id: int | None = None,
        message: str = "",
    ) -> Job:
        if state not in ENDED:
            raise JobStateError(f"job {job_id} cannot end as {state!r}: give one of {', '.join(ENDED)}")
        values = _ending(state, message) | {"counts": dict(counts or {}), "configuration_id": configuration_id}
        statement = update(JobRow).where(_held(job_id, attempt)).values(values)
        with self._transactions.writing() as connection:
            ended = connection.execute(statement).rowcount > 0
            if ended:
                self._drop_request(connection, job_id)
            found = self._job(connection, job_id)
        if ended or (found.attempt, found.state, found.configuration_id) == (attempt, state, configuration_id):
            return found  # if it was stored before, the answer was lost on its way
        now = f"at attempt {found.attempt}" if found.attempt else "with no worker"
        raise JobStateError(
            f"attempt {attempt} of job {job_id} cannot end it: the job is {found.state}, {now}; only who runs a job "
            "can end it"
        )

    @retried
    def release(self, job_id: int, attempt: int, *, lost: bool = False) -> None:
        with self._transactions.writing() as connection:
            query = select(JobRow.cancelling, JobRow.losses).where(_held(job_id, attempt)).with_for_update()
            found = connection.execute(query).one_or_none()
            if found is None:
                return
            losses = found.losses + 1 if lost else 0
            if found.cancelling:
                self._end(connection, job_id, "cancelled", "it was cancelled; what was measured is kept")
            elif losses >= ATTEMPTS:
                self._end(connection, job_id, "failed", given_up(losses))
            else:
                put_back = {"state": "queued", "worker": None, "losses": losses, "revision": JobRow.revision + 1}
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
    def jobs(
        self,
        *,
        state: JobState | None = None,
        limit: int | None = None,
        before: int | None = None,
        brief: bool = False,
    ) -> list[Job]:
        query = select(*(BRIEF if brief else KEYED)).order_by(JobRow.id.desc()).limit(limit)
        if state is not None:
            query = query.where(JobRow.state == state)
        if before is not None:
            query = query.where(JobRow.id < before)
        with self._transactions.reading() as connection:
            return self._jobs(connection, connection.execute(query).all())

    @retried
    def revisions(self, job_ids: Iterable[int]) -> dict[int, tuple[int, bool]]:
        columns = (JobRow.id, JobRow.revision, JobRow.state, JobRow.worker)
        query = select(*columns).where(JobRow.id.in_(list(job_ids)))
        with self._transactions.reading() as connection:
            rows = connection.execute(query).all()
            gone = self._gone(connection, rows)
        return {row.id: (row.revision, row.state == "running" and row.worker in gone) for row in rows}

    @retried
    def queued(self, client: str) -> int:
        query = select(func.count()).where(JobRow.state == "queued", JobRow.client == client)
        with self._transactions.reading() as connection:
            return connection.execute(query).scalar_one()

    @retried
    def submitted(self, client: str, since: datetime) -> int:
        query = select(func.coalesce(func.sum(SIZE), 0)).where(JobRow.client == client, JobRow.created_at > since)
        with self._transactions.reading() as connection:
            return int(connection.execute(query).scalar_one())

    @retried
    def released(self, client: str, since: datetime, wanted: int) -> datetime | None:
        query = select(JobRow.created_at, SIZE.label("bytes")).where(JobRow.client == client, JobRow.created_at > since)
        left = wanted
        with self._transactions.reading() as connection:
            for created_at, number in connection.execute(query.order_by(JobRow.created_at)):
                left -= number
                if left <= 0:
                    return created_at
        return None

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
    def greet(self, worker: str, device_type: str, device_name: str, memory_bytes: int | None = None) -> None:
        values = {
            "name": worker, "device_type": device_type, "device_name": device_name, "memory_bytes": memory_bytes,
        }  # fmt: skip
        with self._transactions.reading() as connection:
            if any(known.name == worker for known in self._workers(connection)):
                return
        with self._transactions.writing() as connection:
            gone = self._locks.gone({there.name for there in self._workers(connection)}, connection)
            connection.execute(delete(WorkerRow).where(WorkerRow.name.in_(gone)))
            there = insert_into(connection, WorkerRow).on_conflict_do_nothing(index_elements=["name"])
            connection.execute(there, values | {"started_at": datetime.now(UTC)})

    @retried
    def leave(self, worker: str) -> None:
        with self._transactions.writing() as connection:
            connection.execute(delete(WorkerRow).where(WorkerRow.name == worker))

    @retried
    def workers(self) -> list[Worker]:
        with self._transactions.reading() as connection:
            found = self._workers(connection)
            held = self._locks.held({worker.name for worker in found}, connection)
        return [worker for worker in found if worker.name in held]

    # Inside a transaction

    def _insert(self, connection: Connection, **asked: Any) -> int | None:
        """Store a job and return its id; None where its idempotency key is that of another."""
        key, number_of_bytes = _written(asked["request"])
        started = {
            "attended": False, "state": "queued", "cancelling": False, "attempt": 0, "losses": 0, "priority": 0,
            "progress": {}, "revision": 1, "counts": {}, "created_at": datetime.now(UTC), "message": "",
            "client": "", "request_key": key, "request_bytes": number_of_bytes,
        }  # fmt: skip
        statement = insert_into(connection, JobRow).on_conflict_do_nothing(index_elements=["client", "idempotency_key"])
        return connection.execute(statement.values(started | asked).returning(JobRow.id)).scalar_one_or_none()

    def _take(self, connection: Connection, job_id: int, runner: str, *, lost: bool = False) -> Job:
        values = {
            "state": "running",
            "worker": runner,
            "started_at": func.coalesce(JobRow.started_at, datetime.now(UTC)),
            "attempt": JobRow.attempt + 1,
            "losses": JobRow.losses + (1 if lost else 0),
            "revision": JobRow.revision + 1,
        }
        connection.execute(update(JobRow).where(JobRow.id == job_id).values(values))
        return self._job(connection, job_id)

    @staticmethod
    def _is_alone(connection: Connection, request_key: str) -> bool:
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

    def _settle(self, connection: Connection, claiming: str | None = None, in_hand: Collection[int] = ()) -> list[int]:
        """End what lost its runner and is not to go on, and return the ids of what is.

        On PostgreSQL the jobs are locked as they were seen here; one that another transaction has in hand is left to
        that.
        """
        query = select(
            JobRow.id, JobRow.state, JobRow.worker, JobRow.attempt, JobRow.attended, JobRow.cancelling, JobRow.losses
        )
        rows = connection.execute(query.where(JobRow.state == "running").order_by(JobRow.id)).all()
        gone = self._gone(connection, rows)
        left_behind = []
        for row in rows:
            given_up_on = row.worker == claiming and not row.attended and row.id not in in_hand
            if not given_up_on and (row.worker not in gone or row.worker == claiming):
                continue
            lock = select(JobRow.id).where(_held(row.id, row.attempt)).with_for_update(skip_locked=True)
            if connection.execute(lock).one_or_none() is None:
                continue
            if row.cancelling:
                self._end(connection, row.id, "cancelled", LOST_CANCELLED)
            elif row.attended:
                self._end(connection, row.id, "interrupted", "its process ended; what it measured is kept")
            elif row.losses + 1 >= ATTEMPTS:
                self._end(connection, row.id, "failed", given_up(row.losses + 1))
            else:
                left_behind.append(row.id)
        return left_behind

    def _gone(self, connection: Connection, rows: Iterable[Row[*tuple[Any, ...]]]) -> set[str]:
        """Return the names of runners that are gone, of those that have a job in these rows."""
        return self._locks.gone({row.worker for row in rows if row.state == "running"}, connection)

    def _jobs(self, connection: Connection, rows: Collection[Row[*tuple[Any, ...]]]) -> list[Job]:
        gone = self._gone(connection, rows)
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

    def _end(self, connection: Connection, job_id: int, state: JobState, message: str) -> None:
        connection.execute(update(JobRow).where(JobRow.id == job_id).values(_ending(state, message)))
        self._drop_request(connection, job_id)

    @staticmethod
    def _drop_request(connection: Connection, job_id: int) -> None:
        """Drop the request of a job that has ended, if it is large and there is a summary."""
        large = (JobRow.id == job_id) & (JobRow.request_bytes > KEPT_BYTES) & JobRow.summary.is_not(None)
        connection.execute(update(JobRow).where(large).values(request={}))

    def _job(self, connection: Connection, job_id: int, *, alone: bool = False) -> Job:
        """Return a job; with `alone`, PostgreSQL keeps others from changing it until the transaction ends."""
        query = select(*KEYED).where(JobRow.id == job_id)
        row = connection.execute(query.with_for_update() if alone else query).one_or_none()
        if row is None:
            raise NotFoundError(f"{self._transactions.shown} has no job {job_id}: `jobs` lists those that exist")
        return self._jobs(connection, [row])[0]

    @staticmethod
    def _workers(connection: Connection) -> list[Worker]:
        query = select(*WORKER).order_by(WorkerRow.started_at, WorkerRow.name)
        return [Worker(**row._mapping) for row in connection.execute(query)]


def _written(request: Mapping[str, Any]) -> tuple[str, int]:
    """Return the key of a request, and the bytes that it takes: equal requests are written alike."""
    text = json_text(request).encode()
    return sha256(text).hexdigest(), len(text)


def _held(job_id: int, attempt: int) -> ColumnElement[bool]:
    return (JobRow.id == job_id) & (JobRow.attempt == attempt) & (JobRow.state == "running")


def given_up(losses: int) -> str:
    return f"its worker was lost {losses} times in a row; what was measured is kept"


def _ending(state: JobState, message: str) -> dict[str, Any]:
    """Return the changes of a job that ends now."""
    return {
        "state": state,
        "cancelling": False,
        "finished_at": datetime.now(UTC),
        "message": message,
        "revision": JobRow.revision + 1,
    }
