"""Serving: the application behind uvicorn, with one line of a log for each request, until it is told to end."""

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autotuner.database import SERVING, open_database
from autotuner.errors import InputError
from autotuner.server.http.application import create_app
from autotuner.server.http.connections import Connection, handle_loop_error
from autotuner.server.http.guard import Hosts

GRACE_S = 4
"""For how long requests in hand may go on when the service is told to end; a worker beside it needs as long again."""

BACKLOG = 128
"""Connections that wait to be accepted. asyncio accepts as many in one go, and logs as many failures."""

log = logging.getLogger("autotuner.server.http")


def serve(
    database_url: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    allowed_hosts: Iterable[str] = (),
    log_level: str = "info",
) -> None:
    """Serve a database over HTTP until the process is told to end (SIGTERM, SIGINT).

    Requests in hand are answered, open streams of events end at once. The log goes to standard error.

    Args:
        database_url: URL, or path of an SQLite file.
        host: address or name to listen at.
        port: 0 for any that is free; the log says which.
        allowed_hosts: names that it answers to beside that of `host` and this machine's own.
        log_level: "info" for a line per request, "warning" for what goes wrong.

    Raises:
        InputError: nobody can listen there, or what is allowed is no host.
        DatabaseError: the database cannot be opened.
    """
    listener = listen(host, port)
    with (
        listener,
        open_database(database_url, timeouts=SERVING, reopens=True) as database,
        _logging(log_level),
    ):
        hosts = Hosts((host, listener.getsockname()[0]), allowed_hosts)
        Server(create_app(database, hosts), listener, ending=database.hurry).run()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: nobody can listen there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # A socket that names its protocol: only then does asyncio turn Nagle's algorithm off, which would hold each
        # body back for 40 ms.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {error}; give an address of this machine and a port that is free (0 for "
            "any)"
        ) from error
    return listener


class Server(uvicorn.Server):
    """An application at a socket; `should_exit` ends it, as a signal does.

    Unlike uvicorn's own, it ends the application's event streams as soon as it is told to end, and returns from `run`
    however it was told. Then it calls `ending` as well.
    """

    def __init__(self, app: FastAPI, listener: socket.socket, *, ending: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                AccessLog(app), log_config=None, access_log=False, lifespan="on", loop="asyncio",
                timeout_graceful_shutdown=GRACE_S, server_header=False, http=Connection, ws="none", backlog=BACKLOG,
            )
        )  # fmt: skip
        self._listener = listener
        self._end_streams: Callable[[], None] = app.state.end_streams
        self._ending = ending

    @property
    def url(self) -> str:
        """URL that it listens at."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(handle_loop_error)
        await super().startup(sockets)
        log.info("serving", extra={"facts": {"url": self.url}})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
        self._ending()
        log.info("ending")
        await super().shutdown(sockets)
        log.info("ended")

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Have signals end this server, and nothing else: uvicorn would raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class AccessLog:
    """Logs each request when its answer is complete: event "request", method, path, status, duration, client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            query = scope["query_string"].decode("latin-1")
            facts = {
                "method": scope["method"],
                "path": scope["path"] + (f"?{query}" if query else ""),
                "status": status,
                "duration_ms": round(1e3 * (time.perf_counter() - began), 2),
                "client": (scope.get("client") or ("",))[0],
            }
            log.info("request", extra={"facts": facts})


class LogFormatter(logging.Formatter):
    """One line for each record: when, what, and the facts that go with it; a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = getattr(record, "facts", None)
        event, facts = (record.getMessage(), facts or {}) if record.name == log.name else (
            "server", {"level": record.levelname.lower(), "text": record.getMessage()}
        )  # fmt: skip
        line = " ".join([now, event, *(f"{name}={value!r}" for name, value in facts.items())])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@contextmanager
def _logging(level: str) -> Generator[None]:
    """Write the service's log, and what goes wrong in uvicorn, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    uvicorns = logging.getLogger("uvicorn")
    before = [(logger, logger.level, logger.propagate) for logger in (log, uvicorns)]
    log.setLevel(level.upper())
    uvicorns.setLevel(logging.WARNING)
    for logger in (log, uvicorns):
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, old, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(old)
            logger.propagate = propagate
