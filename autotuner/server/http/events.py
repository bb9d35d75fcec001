"""Events: a job's changes as server-sent events. One query at a time reads all jobs that are followed."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from autotuner.database import ENDED, Database, Job
from autotuner.errors import AutotunerError, DatabaseError
from autotuner.server.http.access import Access, Quota
from autotuner.server.http.connections import WATCHERS, streams_max
from autotuner.server.http.documentation import TEMPLATE, refusals
from autotuner.server.http.examples import EVENTS
from autotuner.server.http.jobs import JobId, find_job, job_view
from autotuner.server.http.problems import RETRY_AFTER_S, Refusal
from autotuner.server.http.strict import StrictRoute
from autotuner.server.wire.values import Cursor

State = tuple[int, bool]
"""Revision of a job, and whether it is lost: what followers are told of."""

LOOK_S = 0.2
HEARTBEAT_S = 10.0
ADMITTED_S = 2.0
"""A stream that has nothing to tell looks so often whether its client may still read it."""

Admitted = Callable[[], Awaitable[str]]
"""Returns why a client may not go on reading, in a sentence; "" where it may."""

log = logging.getLogger("autotuner.server.http")


async def _always() -> str:
    return ""


class Watched:
    """A job as it was read last, and the event that tells so."""

    def __init__(self, job: Job, event: bytes) -> None:
        self.followers = 0
        self.over = False
        self.changed = asyncio.Event()
        self.tell(job, event)

    @property
    def state(self) -> State:
        return self.job.revision, self.job.is_lost

    def is_news(self, job: Job) -> bool:
        """Say whether a job was read later than the one that is known, and differs from it."""
        return job.revision >= self.job.revision and (job.revision, job.is_lost) != self.state

    def tell(self, job: Job, event: bytes) -> None:
        self.job, self.event = job, event
        self._wake()

    def end(self) -> None:
        """Say that nothing more will be read of it."""
        self.over = True
        self._wake()

    def _wake(self) -> None:
        woken, self.changed = self.changed, asyncio.Event()
        woken.set()


class Watch:
    """The jobs that are followed; while there are any, one task looks for changes, five times a second.

    Args:
        render: returns the event that tells how a job is; once for each change, in a thread.
        counted: called with 1 when a stream is opened, and with -1 when it has ended.
    """

    def __init__(
        self,
        database: Database,
        render: Callable[[Job], bytes],
        counted: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._render, self._counted = render, counted
        self._watched: dict[int, Watched] = {}
        self.streams = Counter[str]()
        self._thread = CapacityLimiter(WATCHERS)
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def followers(self) -> int:
        return sum(watched.followers for watched in self._watched.values())

    @property
    def closed(self) -> bool:
        """True once the service ends."""
        return self._closed

    def close(self) -> None:
        """End every stream, and those to come after what they have to tell."""
        self._closed = True
        self._end_all()

    async def follow(
        self, job: Job, event: bytes, told: int, client: str = "", admitted: Admitted = _always
    ) -> AsyncIterator[bytes]:
        """Yield a job's event after each change until it has ended; a comment where nothing happens for long.

        Args:
            job, event: as they were just read.
            told: revision that the client knows.
            client: of whom `streams` counts this one.
            admitted: asked before each event and every few seconds; the stream ends where the client may read no more.
        """
        watched, seen = self._enter(job, event), (told, False)
        self.streams[client] += 1
        self._counted(1)
        try:
            yield b": events of a job; a comment like this comes every 10 s\n\n"
            said_at = monotonic()
            while True:
                if refusal := await admitted():
                    yield f": {refusal}\n\n".encode()
                    return
                if watched.state != seen:
                    said_at = monotonic()
                    seen = watched.state
                    yield watched.event
                elif watched.job.ended or watched.over:
                    return
                else:
                    silent_s = HEARTBEAT_S - (monotonic() - said_at)
                    try:
                        await asyncio.wait_for(watched.changed.wait(), max(0.0, min(silent_s, ADMITTED_S)))
                    except TimeoutError:
                        if monotonic() - said_at >= HEARTBEAT_S:
                            said_at = monotonic()
                            yield b": still here\n\n"
        finally:
            self._leave(job.id, watched)
            self.streams[client] -= 1
            self._counted(-1)
            if not self.streams[client]:
                del self.streams[client]

    def _enter(self, job: Job, event: bytes) -> Watched:
        watched = self._watched.get(job.id)
        if watched is None:
            watched = self._watched[job.id] = Watched(job, event)
            watched.over = self._closed
        elif watched.is_news(job):
            watched.tell(job, event)
        watched.followers += 1
        if self._looking is None and not self._closed:
            self._looking = asyncio.create_task(self._look())
        return watched

    def _leave(self, job_id: int, watched: Watched) -> None:
        watched.followers -= 1
        if not watched.followers and self._watched.get(job_id) is watched:
            del self._watched[job_id]

    async def _look(self) -> None:
        """Tell those who follow what has changed, until nobody follows or the jobs cannot be read."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                if not self._watched or self._closed:
                    return
                known = {job_id: watched.state for job_id, watched in self._watched.items()}
                changed, gone = await run_sync(self._read, known, limiter=self._thread)
                for job, event in changed:
                    if (watched := self._watched.get(job.id)) is not None and watched.is_news(job):
                        watched.tell(job, event)
                for job_id in gone:
                    if (watched := self._watched.pop(job_id, None)) is not None:
                        watched.end()
        except AutotunerError as error:
            # Clients open new streams, and learn from their status what is the matter.
            log.error("events_ended", extra={"facts": {"streams": self.followers, "error": str(error)}})
        except Exception as error:
            log.error("failed", extra={"facts": {"streams": self.followers}}, exc_info=error)
        finally:
            self._looking = None
            self._end_all()

    def _read(self, known: dict[int, State]) -> tuple[list[tuple[Job, bytes]], set[int]]:
        """Return the jobs that have changed, with their events, and the ids of those that are not there any more."""
        revisions = self._database.queue.revisions(known)
        changed = [job_id for job_id, state in revisions.items() if state != known[job_id]]
        jobs = [self._database.queue.job(job_id) for job_id in changed]
        return [(job, self._render(job)) for job in jobs], known.keys() - revisions.keys()

    def _end_all(self) -> None:
        for watched in self._watched.values():
            watched.end()
        self._watched.clear()


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


def event_routes(database: Database, watch: Watch, quota: Quota, access: Access) -> APIRouter:
    """Return the route of events."""
    routes = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictRoute)

    @routes.get(
        "/{job_id}/events",
        operation_id="follow_job",
        summary="Follow a job by server-sent events",
        response_class=StreamingResponse,
        responses={**RESPONSES, **refusals(404, 429)},
    )
    async def events(
        job_id: JobId,
        request: Request,
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
        client = request.state.caller.name
        if watch.streams[client] >= quota.streams:
            detail = f"{client} has {quota.streams} streams of events, and may open no more: end one first"
            raise Refusal(429, detail, headers={"Retry-After": str(RETRY_AFTER_S)})

        async def admitted() -> str:
            try:
                await access.caller(request.scope, "reader")
            except Refusal as refusal:
                return str(refusal.detail)
            except DatabaseError:
                pass  # who reads the jobs finds the same, and ends all streams
            return ""

        stream = watch.follow(job, event, last_event_id, client, admitted)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    return routes


def _found(database: Database, job_id: int) -> tuple[Job, bytes]:
    job = find_job(database, job_id)
    return job, render(job)


def render(job: Job) -> bytes:
    """Return the event that tells how a job is."""
    kind = job.state if job.ended else "progress"
    return f"id: {job.revision}\nevent: {kind}\ndata: {job_view(job).model_dump_json()}\n\n".encode()
