"""A job's changes as server-sent events."""

import logging
from collections.abc import AsyncIterator
from threading import Event
from time import monotonic
from typing import Annotated, Any

from anyio import sleep
from fastapi import APIRouter, Header, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from autotuner.database import ENDED, Database, Job
from autotuner.errors import AutotunerError
from autotuner.service.described import TEMPLATE, refusals
from autotuner.service.examples import EVENTS
from autotuner.service.jobs import JobId, find_job
from autotuner.service.strict import StrictRoute
from autotuner.service.views import job_view
from autotuner.wire import Cursor

LOOK_S = 0.2
HEARTBEAT_S = 10.0
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
log = logging.getLogger("autotuner.service")

EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["id", "event", "data"],
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"enum": ["progress", *ENDED]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": TEMPLATE.format(model="JobView")},
        },
    },
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events until the job has ended: `progress`, then one of `finished`, `failed`, `cancelled`, "
        "`interrupted`. The id of each is the job's `revision`, its data the job as `GET /v1/jobs/{job_id}` has it. "
        "Changes that lie close together come as one. A worker that is lost is a `progress` too, of the same revision, "
        "with `stalled`. A comment comes every 10 s.",
        "content": {"text/event-stream": {"itemSchema": EVENT, "example": EVENTS}},
    },
    204: {"description": "The job has ended, and `Last-Event-ID` is its last event: there will be no other."},
}


def event_routes(database: Database, closing: Event) -> APIRouter:
    """Return the route of events.

    Args:
        closing: set when the service ends, so that no stream holds it.
    """
    routes = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictRoute)

    @routes.get(
        "/{job_id}/events",
        operation_id="follow_job",
        summary="Follow a job by server-sent events",
        response_class=StreamingResponse,
        responses={**RESPONSES, **refusals(404)},
    )
    async def events(
        job_id: JobId,
        request: Request,
        last_event_id: Annotated[
            Cursor, Header(description="Id of the last event that was received: what it said is not repeated.")
        ] = 0,
    ) -> Response:
        """Send the job as it is now, then again after each change, and end when it has ended."""
        job = await run_in_threadpool(find_job, database, job_id)
        if job.ended and job.revision == last_event_id:
            return Response(status_code=204)
        stream = _changes(database, job, last_event_id, request, closing)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    return routes


async def _changes(database: Database, job: Job, last: int, request: Request, closing: Event) -> AsyncIterator[bytes]:
    yield b": events of a job; a comment like this comes every 10 s\n\n"
    spoken_at, told = monotonic(), (last, False)
    while not closing.is_set():
        if (job.revision, job.is_lost) != told:
            yield await run_in_threadpool(_event, job)
            told, spoken_at = (job.revision, job.is_lost), monotonic()
        elif monotonic() - spoken_at > HEARTBEAT_S:
            yield b": still here\n\n"
            spoken_at = monotonic()
        if job.ended or await request.is_disconnected():
            return
        await sleep(LOOK_S)
        try:
            job = await run_in_threadpool(find_job, database, job.id)
        except AutotunerError as error:
            # The client opens a new stream, and learns from its status what is the matter.
            log.error("events_ended", extra={"facts": {"job": job.id, "error": str(error)}})
            return


def _event(job: Job) -> bytes:
    kind = job.state if job.ended else "progress"
    return f"id: {job.revision}\nevent: {kind}\ndata: {job_view(job).model_dump_json()}\n\n".encode()
