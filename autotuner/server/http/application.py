"""The application: routes, problems and limits put together over one database."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI

from autotuner.database import Database
from autotuner.server.http.configurations import configuration_routes
from autotuner.server.http.connections import READERS
from autotuner.server.http.documentation import DESCRIPTION, describe, documentation_routes
from autotuner.server.http.events import Watch, event_routes, render
from autotuner.server.http.guard import Guard, HeadAsGet, Hosts
from autotuner.server.http.jobs import job_routes
from autotuner.server.http.known import known_routes
from autotuner.server.http.problems import handle_problems
from autotuner.server.http.strict import BodyLimit
from autotuner.server.http.submissions import ModelFiles


def create_app(database: Database, hosts: Hosts | None = None) -> FastAPI:
    """Return the service over a database, which stays open; `app.state.end_streams` ends its event streams.

    Args:
        hosts: that it answers to; None for this machine's own.
    """
    number, files, watch = version("autotuner"), ModelFiles(), Watch(database, render)
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
    app.state.end_streams = watch.close
    app.include_router(job_routes(database, files))
    app.include_router(event_routes(database, watch))
    app.include_router(configuration_routes(database, files))
    app.include_router(known_routes(database, files, number))
    app.include_router(documentation_routes(app.title))
    handle_problems(app)
    describe(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, hosts=hosts or Hosts())
    return app


@asynccontextmanager
async def _lifespan(_app: FastAPI) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = READERS
    yield
