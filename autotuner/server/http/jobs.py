"""Routes of jobs: submit, list, show, cancel."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from math import ceil
from threading import Lock
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Body, Header, Path, Query, Response
from fastapi import Request as HttpRequest

from autotuner.database import Database, Job
from autotuner.errors import NotFoundError
from autotuner.ir.models import Model
from autotuner.plan.request import Request
from autotuner.server.http.access import Caller, Quota
from autotuner.server.http.connections import CHECKERS, WRITERS
from autotuner.server.http.documentation import refusals
from autotuner.server.http.examples import SUBMISSIONS
from autotuner.server.http.paging import page_of
from autotuner.server.http.problems import Refusal
from autotuner.server.http.strict import StrictRoute
from autotuner.server.http.submissions import ModelFiles, Submission, request_of
from autotuner.server.wire.requests import JobsQuery, SubmittedLimits
from autotuner.server.wire.responses import JobPage, JobView, TracePoint, TraceView
from autotuner.server.wire.values import KEY_PATTERN, PRIORITY_MAX, Id
from autotuner.settings import TuneOptions

QUEUED_RETRY_AFTER_S = 30
DAY = timedelta(days=1)

JOB_MAX_BYTES = 2**18
"""Of a request with its model, about 40 times that of an encoder layer."""

JobId = Annotated[Id, Path(description="Of a job, as `POST /v1/jobs` returns it.", examples=[7])]

_BY_ID = {"parameters": {"job_id": "$response.body#/id"}}
LINKS: dict[str, Any] = {
    "job": {"operationId": "get_job", "description": "The job as it is now.", **_BY_ID},
    "events": {"operationId": "follow_job", "description": "Every change of the job.", **_BY_ID},
    "cancel": {"operationId": "cancel_job", "description": "End the job.", **_BY_ID},
}
TO_CONFIGURATION: dict[str, Any] = {
    "configuration": {
        "operationId": "get_configuration",
        "description": "The answer, once the job is finished.",
        "parameters": {"configuration_id": "$response.body#/configuration_id"},
    }
}
LOCATION: dict[str, Any] = {"Location": {"description": "Path of the job.", "schema": {"type": "string"}}}


def find_job(database: Database, job_id: int) -> Job:
    """Return a job.

    Raises:
        NotFoundError: there is none with this id.
    """
    try:
        return database.queue.job(job_id)
    except NotFoundError:
        raise NotFoundError(f"no job {job_id}: GET /v1/jobs lists those that there are") from None


def job_routes(database: Database, files: ModelFiles, quota: Quota) -> APIRouter:
    routes = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictRoute)
    checking, writing, submitting = CapacityLimiter(CHECKERS), CapacityLimiter(WRITERS), Submitting(database, quota)

    @routes.post(
        "",
        status_code=201,
        operation_id="submit_job",
        summary="Submit a tuning job",
        response_description="The job, which waits for a worker of its device.",
        responses={
            200: {
                "description": "The job that was submitted under this key before, as it is by now.",
                "model": JobView,
                "headers": LOCATION,
                "links": LINKS,
            },
            201: {
                "description": "The job, which waits for a worker of its device.",
                "headers": LOCATION,
                "links": LINKS,
            },
            **refusals(403, 404, 408, 409, 413, 415, 429),
        },
    )
    async def submit(
        submission: Annotated[Submission, Body(openapi_examples=SUBMISSIONS)],
        http: HttpRequest,
        response: Response,
        idempotency_key: Annotated[
            str | None,
            Header(
                description="Made up by the client for this job: however often it is sent, one job is stored.",
                pattern=KEY_PATTERN,
                examples=["8e03978e-40d5-43dd-bc93-6894a57f9324"],
            ),
        ] = None,
    ) -> JobView:
        """Store a job that waits for a worker of its device; see `GET /v1/jobs/{job_id}/events` for how it goes on.

        `model` names a model of the service with or without a preset, or is the content of a model file, as JSON.
        `extents`, `options` and `dtype` replace values of the preset and the file. `gap` ends measuring as soon as the
        best plan is proven to take at most this share longer than the best there can be. A `priority` above 0 is for
        admins.

        With an `Idempotency-Key`, the request may be sent again where its answer was lost: it is answered by the job
        that is there, with 200. Another request of the client under the same key is a 409.
        """
        check_priority(submission.priority, http.state.caller)
        request = await run_sync(request_of, submission, files, database, limiter=checking)
        enqueued = partial(submitting.enqueued, request, http.state.caller, submission.priority, _bare(idempotency_key))
        job = await run_sync(enqueued, limiter=writing)
        if not job.is_new:
            response.status_code = 200
        response.headers["Location"] = f"/v1/jobs/{job.id}"
        return job_view(job)

    @routes.get(
        "",
        operation_id="list_jobs",
        summary="List jobs, the newest first",
        responses={200: {"description": "A page of jobs."}, **refusals()},
    )
    def jobs(query: Annotated[JobsQuery, Query()]) -> JobPage:
        """Return a page of jobs; `next` of a page is `before` of the one after it.

        A page has about 4 MiB at most, and so perhaps fewer jobs than were asked for.
        """
        return _page(database, query)

    @routes.get(
        "/{job_id}",
        operation_id="get_job",
        summary="Show a job",
        responses={200: {"description": "The job as it is now.", "links": TO_CONFIGURATION}, **refusals(404)},
    )
    def job(job_id: JobId) -> JobView:
        """Return a job: what was asked, how far it is, and how it ended."""
        return job_view(find_job(database, job_id))

    @routes.get(
        "/{job_id}/trace",
        operation_id="trace_job",
        summary="Show how a job came along",
        responses={200: {"description": "Its progress over time."}, **refusals(404)},
    )
    def trace(job_id: JobId) -> TraceView:
        """Return the progress of a job over time: the best plan and the bound closing in on each other."""
        found = find_job(database, job_id).progress or {}
        return TraceView(points=[TracePoint.model_validate(point) for point in found.get("trace", ())])

    @routes.post(
        "/{job_id}/cancel",
        operation_id="cancel_job",
        summary="Cancel a job",
        responses={200: {"description": "The job, cancelled or about to end."}, **refusals(403, 404, 409, 413, 415)},
    )
    async def cancel(job_id: JobId, http: HttpRequest) -> JobView:
        """Cancel a job: one that waits ends at once, one that runs as soon as its worker has heard of it.

        What was measured is kept. A job that is cancelled already stays so; one that has ended otherwise is a 409. A
        submitter cancels its own jobs, an admin all.
        """
        return job_view(await run_sync(_cancelled, database, job_id, http.state.caller, limiter=writing))

    return routes


def _page(database: Database, query: JobsQuery) -> JobPage:
    def read(number: int, before: int | None) -> list[JobView]:
        found = database.queue.jobs(state=query.state, limit=number, before=before, brief=True)
        return [job_view(job) for job in found]

    items, after = page_of(read, query.limit, query.before)
    return JobPage(items=items, next=after)


class Submitting:
    """Stores jobs of clients, as many as a client may have waiting, and as many bytes as it may submit in a day."""

    def __init__(self, database: Database, quota: Quota) -> None:
        self._database = database
        self._most, self._daily_bytes = quota.queued, quota.daily_bytes
        self._lock = Lock()

    def enqueued(self, request: Request, caller: Caller, priority: int, idempotency_key: str | None) -> Job:
        """Store a job of a client.

        Raises:
            KeyReusedError: the client has another request under this key.
            Refusal: 413, it is too large for any client. 429, as many of its jobs wait as may, or it has submitted as
                many bytes within 24 hours as it may. Processes of a service that store jobs of one client in the same
                moment may together exceed both by one job each.
        """
        queue, document = self._database.queue, request.to_json()
        taken = len(json.dumps(document, separators=(",", ":")))
        if taken > JOB_MAX_BYTES:
            raise Refusal(
                413,
                f"the job takes {taken} bytes with its model, and one may take {JOB_MAX_BYTES}: send a smaller model",
            )
        with self._lock:
            if not (idempotency_key and queue.has_key(caller.name, idempotency_key)):
                self._check_waiting(caller)
                self._check_bytes(caller, taken)
            return queue.enqueue(
                model=request.model.reference, request=document, device_type=request.device_type,
                device_name=request.device_name, client=caller.name, priority=priority, idempotency_key=idempotency_key,
                summary=request.summary(),
            )  # fmt: skip

    def _check_waiting(self, caller: Caller) -> None:
        if self._database.queue.queued(caller.name) >= self._most:
            detail = f"{self._most} jobs of {caller.name} wait for a worker, and no more may: try again later"
            raise Refusal(429, detail, headers={"Retry-After": str(QUEUED_RETRY_AFTER_S)})

    def _check_bytes(self, caller: Caller, taken: int) -> None:
        queue, now = self._database.queue, datetime.now(UTC)
        submitted = queue.submitted(caller.name, now - DAY)
        over = submitted + taken - self._daily_bytes
        if over <= 0:
            return
        oldest = queue.released(caller.name, now - DAY, over)
        free_at = now + DAY if oldest is None else oldest + DAY
        raise Refusal(
            429,
            f"{caller.name} has submitted {submitted} bytes of jobs within 24 hours, this one takes {taken}, and "
            f"{self._daily_bytes} may be submitted: try again after {free_at.isoformat(timespec='seconds')}",
            headers={"Retry-After": str(max(1, ceil((free_at - now).total_seconds())))},
        )


def check_priority(priority: int, caller: Caller) -> None:
    """Check that a client may have its job taken before those of others.

    Raises:
        Refusal: 403, it may not.
    """
    if priority > 0 and not caller.may("admin"):
        raise Refusal(
            403,
            f"priority {priority}: {caller.name} is of role {caller.role}, which gives priorities from "
            f"{-PRIORITY_MAX} to 0; a token of role admin gives up to {PRIORITY_MAX}",
        )


def _bare(key: str | None) -> str | None:
    """Return a key without the quotes that the header's own syntax has around it."""
    return key[1:-1] if key and len(key) > 2 and key[0] == key[-1] == '"' else key


def _cancelled(database: Database, job_id: int, caller: Caller) -> Job:
    job = find_job(database, job_id)
    if not caller.may("admin") and job.client != caller.name:
        whose = job.client or "nobody who asked this service"
        raise Refusal(403, f"job {job_id} is of {whose}: {caller.name} cancels its own, a token of role admin any")
    return database.queue.cancel(job_id)


def job_view(job: Job) -> JobView:
    """Return what the service tells of a job: its row, and the summary of its request."""
    found = {name: getattr(job, name) for name in JobView.model_fields if hasattr(job, name)}
    found |= job.summary or _summary_of(job.request)
    found["limits"] = SubmittedLimits.model_construct(**found["limits"])
    found["progress"] = job.progress or None
    return JobView(**found, stalled=_stalled(job))


def _summary_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a job that was stored without one."""
    model = Model(**request["model"])  # checked when it was stored
    found = {name: getattr(model, name) for name in ("family", "extents", "options", "dtype")}
    return found | {name: value for name, value in request.items() if name in TuneOptions.names()}


def _stalled(job: Job) -> str:
    if not job.is_lost:
        return ""
    if job.attended:
        return "the process that ran it is gone; what it measured is kept, the same command goes on from there"
    if job.cancelling:
        return "its worker is gone; it ends as cancelled as soon as another one comes"
    return f"its worker is gone; the next one for {job.device_name or job.device_type} goes on from what was measured"
