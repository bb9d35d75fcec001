"""A job's changes as server-sent events."""

from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from autotuner.database import ENDED, Database, Job
from autotuner.server.http.connections import streams_max
from autotuner.server.http.described import TEMPLATE, refusals
from autotuner.server.http.examples import EVENTS
from autotuner.server.http.jobs import JobId, find_job
from autotuner.server.http.problems import RETRY_AFTER_S, Refusal
from autotuner.server.http.strict import StrictRoute
from autotuner.server.http.views import job_view
from autotuner.server.http.watching import Watch
from autotuner.server.wire import Cursor

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

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


def event_routes(database: Database, watch: Watch) -> APIRouter:
    """Return the route of events."""
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
        last_event_id: Annotated[
            Cursor, Header(description="Id of the last event that was received: what it said is not repeated.")
        ] = 0,
    ) -> Response:
        """Send the job as it is now, then again after each change, and end when it has ended."""
        job, event = await run_in_threadpool(_found, database, job_id)
        if job.ended and job.revision == last_event_id:
            return Response(status_code=204)
        most = streams_max()
        if watch.followers >= most:
            detail = f"the service has {most} streams of events, and opens no more now: try again later"
            raise Refusal(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})
        stream = watch.follow(job, event, last_event_id)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    return routes


def _found(database: Database, job_id: int) -> tuple[Job, bytes]:
    job = find_job(database, job_id)
    return job, render(job)


def render(job: Job) -> bytes:
    """Return the event that tells how a job is."""
    kind = job.state if job.ended else "progress"
    return f"id: {job.revision}\nevent: {kind}\ndata: {job_view(job).model_dump_json()}\n\n".encode()
