"""Routes for those who run the service: whether it lives, whether it can answer, and its metrics."""

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter
from starlette.responses import Response

from autotuner.database import Database
from autotuner.server.http.connections import PROBES
from autotuner.server.http.documentation import open_refusals, refusals
from autotuner.server.http.events import Watch
from autotuner.server.http.examples import METRICS
from autotuner.server.http.metrics import CONTENT_TYPE, Metrics
from autotuner.server.http.problems import RETRY_AFTER_S, Refusal
from autotuner.server.http.strict import OpenRoute, StrictRoute
from autotuner.server.wire.responses import Health, Liveness, Readiness


def operation_routes(database: Database, version: str, metrics: Metrics, watch: Watch) -> APIRouter:
    routes = APIRouter(tags=["service"])
    for_all = APIRouter(route_class=OpenRoute)
    for_readers = APIRouter(route_class=StrictRoute)
    probing = CapacityLimiter(PROBES)

    @for_all.get(
        "/v1/healthz",
        operation_id="get_health",
        summary="Say whether the service can answer",
        responses={200: {"description": "The service reads its database."}, **open_refusals()},
    )
    @for_all.get("/healthz", include_in_schema=False)
    async def health() -> Health:
        """Return how many jobs wait and run, and how many workers there are; 503 where the database cannot be read.

        The same is at /healthz, where probes look for it. It needs no token.
        """
        return await run_sync(_health, database, version, limiter=probing)

    @for_all.get(
        "/v1/livez",
        operation_id="get_liveness",
        summary="Say whether the process of the service answers",
        responses={200: {"description": "The process answers."}, **open_refusals()},
    )
    @for_all.get("/livez", include_in_schema=False)
    async def liveness() -> Liveness:
        """Say that this process answers, whatever the database does: a restart would not bring the database back.

        The same is at /livez, where probes look for it. It needs no token.
        """
        return Liveness(status="alive")

    @for_all.get(
        "/v1/readyz",
        operation_id="get_readiness",
        summary="Say whether the service takes requests",
        responses={200: {"description": "Requests may be sent here."}, **open_refusals()},
    )
    @for_all.get("/readyz", include_in_schema=False)
    async def readiness() -> Readiness:
        """Say whether a load balancer may send requests here: the database is reachable and has space, its tables are
        those that this version works with, and the service is not about to end; otherwise 503.

        The same is at /readyz, where probes look for it. It needs no token.
        """
        if watch.closed:
            raise Refusal(503, "the service ends", headers={"Retry-After": str(RETRY_AFTER_S)})
        await run_sync(database.inventory.check_schema, limiter=probing)
        if database.space.is_full:
            detail = "the disk of the database is full, so nothing can be stored: make space there"
            raise Refusal(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})
        return Readiness(status="ready")

    @for_readers.get(
        "/metrics",
        operation_id="get_metrics",
        summary="Get metrics for Prometheus",
        response_class=Response,
        responses={
            200: {
                "description": "Prometheus' text format.",
                "content": {"text/plain": {"schema": {"type": "string"}, "example": METRICS}},
            },
            **refusals(),
        },
    )
    async def page() -> Response:
        """Return figures of requests, jobs, workers and measurements in Prometheus' text format.

        Those of the database are read at most every 5 s; `autotuner_database_up` is 0 where it cannot be read, and
        `autotuner_disk_full` is 1 where nothing can be stored.
        """
        return Response(await run_sync(metrics.page, limiter=probing), headers={"Content-Type": CONTENT_TYPE})

    routes.include_router(for_all)
    routes.include_router(for_readers)
    return routes


def _health(database: Database, version: str) -> Health:
    waiting = database.queue.waiting()
    workers = len(database.queue.workers())
    return Health(status="ok", version=version, queued=waiting["queued"], running=waiting["running"], workers=workers)
