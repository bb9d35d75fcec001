"""The application: routes, problems and limits put together over one database."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from autotuner.database import Database
from autotuner.errors import DatabaseError
from autotuner.server.http.access import Access, Quota
from autotuner.server.http.answers import Answers
from autotuner.server.http.configurations import configuration_routes
from autotuner.server.http.connections import READERS
from autotuner.server.http.documentation import DESCRIPTION, describe, documentation_routes
from autotuner.server.http.events import Watch, event_routes, render
from autotuner.server.http.guard import Guard, HeadAsGet, Hosts
from autotuner.server.http.jobs import job_routes
from autotuner.server.http.known import known_routes
from autotuner.server.http.metrics import Metrics
from autotuner.server.http.operations import operation_routes
from autotuner.server.http.pages import page_routes
from autotuner.server.http.plans import plan_routes
from autotuner.server.http.problems import handle_problems
from autotuner.server.http.strict import BodyLimit
from autotuner.server.http.submissions import ModelFiles
from autotuner.server.http.tokens import token_routes
from autotuner.settings import package_version

QUOTA = Quota()
CROSS_ORIGIN: dict[str, Any] = {
    "allow_methods": ["GET", "HEAD", "POST"],
    "allow_headers": ["Authorization", "Content-Type", "If-None-Match", "Last-Event-ID", "X-Request-Id"],
    "expose_headers": ["ETag", "Location", "Retry-After", "WWW-Authenticate", "X-Request-Id"],
    "max_age": 600,
}
"""Of sites that are allowed; cookies are never read, so credentials are not."""


def create_app(
    database: Database,
    hosts: Hosts | None = None,
    *,
    local: bool = True,
    quota: Quota = QUOTA,
    origins: Collection[str] = (),
) -> FastAPI:
    """Return the service over a database, which stays open; `app.state.end_streams` ends its event streams.

    Args:
        hosts: that it answers to; None for this machine's own.
        local: answer without tokens, as long as the database has none.
        quota: of each client.
        origins: of sites whose pages may ask it (CORS).
    """
    number, files = package_version(), ModelFiles()
    metrics = Metrics(database, number)
    watch = Watch(database, render, metrics.count_streams)
    access, answers = Access(database, local=local), Answers(database)
    app = FastAPI(
        title="autotuner",
        summary="Layout and algorithm autotuner for transformer training",
        description=DESCRIPTION,
        version=number,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.end_streams, app.state.access, app.state.metrics = watch.close, access, metrics
    app.include_router(job_routes(database, files, quota))
    app.include_router(event_routes(database, watch, quota, access))
    app.include_router(configuration_routes(database, files, answers))
    app.include_router(plan_routes(database, answers))
    app.include_router(known_routes(database, files))
    app.include_router(operation_routes(database, number, metrics, watch))
    app.include_router(token_routes(database, access, number))
    app.include_router(documentation_routes(app.title))
    app.include_router(page_routes())
    handle_problems(app)
    describe(app, access)
    app.add_middleware(BodyLimit)
    app.add_middleware(HeadAsGet)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), **CROSS_ORIGIN)
    app.add_middleware(Guard, hosts=hosts or Hosts(), origins=origins)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = READERS
    looking = asyncio.create_task(_look_for_tokens(app.state.access))  # a database that hangs keeps nobody waiting
    yield
    looking.cancel()


async def _look_for_tokens(access: Access) -> None:
    with suppress(DatabaseError):  # which requests will tell of
        await access.required()
