"""The application: routes, problems and limits put together over one database."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from threading import Event

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from starlette.responses import RedirectResponse

from autotuner.database import Database
from autotuner.service.configurations import configuration_routes
from autotuner.service.described import DESCRIPTION, describe
from autotuner.service.events import event_routes
from autotuner.service.jobs import job_routes
from autotuner.service.known import known_routes
from autotuner.service.modelfiles import ModelFiles
from autotuner.service.problems import handle_problems
from autotuner.service.strict import BodyLimit

THREADS = 12
"""Below the 15 connections that an engine opens, so that no request waits for one in vain."""


def create_app(database: Database) -> FastAPI:
    """Return the service over a database, which stays open; `app.state.closing` ends its event streams."""
    number, files, closing = version("autotuner"), ModelFiles(), Event()
    app = FastAPI(
        title="autotuner",
        summary="Layout and algorithm autotuner for transformer training",
        description=DESCRIPTION,
        version=number,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    app.state.closing = closing
    app.include_router(job_routes(database, files))
    app.include_router(event_routes(database, closing))
    app.include_router(configuration_routes(database, files))
    app.include_router(known_routes(database, files, number))

    @app.get("/", include_in_schema=False)
    def index() -> RedirectResponse:
        return RedirectResponse("/docs")

    handle_problems(app)
    describe(app)
    app.add_middleware(BodyLimit)
    return app


@asynccontextmanager
async def _lifespan(_app: FastAPI) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = THREADS
    yield
