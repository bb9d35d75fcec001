"""The queue in SQL: jobs and workers in the tables of the database."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from autotuner.database.contract import ATTEMPTS, Device, Queue
from autotuner.database.job_rows import BRIEF, KEYED, LOST_CANCELLED, RUNS, JobRows, ending, given_up, held, written
from autotuner.database.locks import Locks
from autotuner.database.retrying import retried
from autotuner.database.tables import JobRow, WorkerRow, insert_into
from autotuner.database.transactions import Transactions
from autotuner.database.values import ENDED, Answer, Job, JobState, Worker
from autotuner.errors import JobStateError, KeyReusedError

ASKED = ("model", "request", "device_type", "device_name", "priority")
WORKER = [getattr(WorkerRow, field.name) for field in fields(Worker)]
WAITING: tuple[JobState, ...] = ("queued", "running")
ROW_BYTES = 2**10
"""Size of a job beside its request, about."""

SIZE = JobRow.request_bytes + ROW_BYTES


class SqlQueue(Queue):
    """A queue in a database. The tests of its contract are `tests/database/conformance/test_queue.py`."""

    def __init__(self, transactions: Transactions, locks: Locks) -> None:
        self._transactions, self._locks = transactions, locks
        self._rows = JobRows(locks, transactions.shown)

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
            job_id = self._rows.insert(
                connection, idempotency_key=idempotency_key, client=client, summary=summary, **asked
            )
            if job_id is not None:
                return replace(self._rows.job(connection, job_id), is_new=True)
            columns = (JobRow.id, JobRow.request_key)
            there = select(*columns).where(JobRow.client == client, JobRow.idempotency_key == idempotency_key)
            found = connection.execute(there).one()
            job = self._rows.job(connection, found.id)
        asked["request"] = json.loads(json.dumps(asked["request"]))
        differs = [name for name in ASKED if getattr(job, name) != asked[name]]
        if found.request_key == written(request)[0]:
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
            self._rows.settle(connection)
            job_id = self._rows.insert(connection, idempotency_key=key, attended=True, **asked)
            if job_id is not None:
                return self._rows.take(connection, job_id, runner)
            there = select(JobRow.id).where(JobRow.client == "", JobRow.idempotency_key == key)
            return self._rows.job(connection, connection.execute(there).scalar_one())

    @retried
    def claim(
        self, runner: str, devices: Iterable[Device], *, limit: int = 1, in_hand: Collection[int] = ()
    ) -> list[Job]:
        fits = [
            and_(JobRow.device_type == kind, or_(JobRow.device_name.is_(None), JobRow.device_name == name))
            for kind, name in devices
        ]
        with self._transactions.writing() as connection:
            left_behind = self._rows.settle(connection, runner, in_hand)
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
                if lost or self._rows.is_alone(connection, found.request_key):
                    taken.append(self._rows.take(connection, found.id, runner, lost=lost))
                left_behind = [job_id for job_id in left_behind if job_id != found.id]
                busy.append(found.request_key)
            return taken

    @retried
    def running(self, runner: str) -> list[Job]:
        query = select(*KEYED).where(JobRow.state == "running", JobRow.worker == runner).order_by(JobRow.id)
        with self._transactions.reading() as connection:
            return self._rows.jobs(connection, connection.execute(query).all())

    @retried
    def report(
        self, job_id: int, attempt: int, *, progress: Mapping[str, Any] | None = None, advanced: bool = False
    ) -> Answer:
        values: dict[str, Any] = {}
        if progress is not None:
            values |= {"progress": dict(progress), "revision": JobRow.revision + 1}
        if advanced:
            values["losses"] = 0
        of_attempt = held(job_id, attempt)
        if values:
            statement = update(JobRow).where(of_attempt).values(values).returning(JobRow.cancelling)
            with self._transactions.writing() as connection:
                cancelling = connection.execute(statement).scalar_one_or_none()
        else:
            with self._transactions.reading() as connection:
                cancelling = connection.execute(select(JobRow.cancelling).where(of_attempt)).scalar_one_or_none()
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
        values = ending(state, message) | {"counts": dict(counts or {}), "configuration_id": configuration_id}
        statement = update(JobRow).where(held(job_id, attempt)).values(values)
        with self._transactions.writing() as connection:
            ended = connection.execute(statement).rowcount > 0
            if ended:
                self._rows.drop_request(connection, job_id)
            found = self._rows.job(connection, job_id)
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
            query = select(JobRow.cancelling, JobRow.losses).where(held(job_id, attempt)).with_for_update()
            found = connection.execute(query).one_or_none()
            if found is None:
                return
            losses = found.losses + 1 if lost else 0
            if found.cancelling:
                self._rows.end(connection, job_id, "cancelled", "it was cancelled; what was measured is kept")
            elif losses >= ATTEMPTS:
                self._rows.end(connection, job_id, "failed", given_up(losses))
            else:
                put_back = {"state": "queued", "worker": None, "losses": losses, "revision": JobRow.revision + 1}
                connection.execute(update(JobRow).where(JobRow.id == job_id).values(put_back))

    @retried
    def cancel(self, job_id: int) -> Job:
        with self._transactions.writing() as connection:
            left_behind = self._rows.settle(connection)
            found = self._rows.job(connection, job_id, alone=True)
            if found.state == "queued":
                self._rows.end(connection, job_id, "cancelled", "it was cancelled while it waited")
            elif job_id in left_behind:
                self._rows.end(connection, job_id, "cancelled", LOST_CANCELLED)
            elif found.state == "running" and not found.cancelling:
                values = {"cancelling": True, "revision": JobRow.revision + 1}
                connection.execute(update(JobRow).where(JobRow.id == job_id).values(values))
            job = self._rows.job(connection, job_id)
        if job.ended and job.state != "cancelled":
            raise JobStateError(f"job {job_id} is {job.state} already: only one that waits or runs is cancelled")
        return job

    @retried
    def job(self, job_id: int) -> Job:
        with self._transactions.reading() as connection:
            return self._rows.job(connection, job_id)

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
            return self._rows.jobs(connection, connection.execute(query).all())

    @retried
    def revisions(self, job_ids: Iterable[int]) -> dict[int, tuple[int, bool]]:
        columns = (JobRow.id, JobRow.revision, JobRow.state, JobRow.worker)
        query = select(*columns).where(JobRow.id.in_(list(job_ids)))
        with self._transactions.reading() as connection:
            rows = connection.execute(query).all()
            gone = self._rows.gone(connection, rows)
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

    @staticmethod
    def _workers(connection: Connection) -> list[Worker]:
        query = select(*WORKER).order_by(WorkerRow.started_at, WorkerRow.name)
        return [Worker(**row._mapping) for row in connection.execute(query)]
