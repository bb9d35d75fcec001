"""Several processes of one service: they share the socket that it listens at, and are kept alive."""

import os
import signal
import sys
import threading
from contextlib import ExitStack
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from autotuner.cli.supervisor import Supervisor
from autotuner.database import SERVING, open_database
from autotuner.errors import InputError
from autotuner.server.http import ServiceOptions, listen
from autotuner.server.http.serving import checked
from autotuner.server.logs import logging_to_stderr, tell


def run_processes(database: str, options: ServiceOptions, number: int, *, in_environment: bool) -> None:
    """Run a service in several processes until this one is told to end (SIGTERM, SIGINT).

    One that dies is started anew. The kernel gives each connection to one of them; all end with this process.

    Args:
        database: URL.
        in_environment: the processes find it there, so that no password is listed among their arguments.

    Raises:
        InputError, DatabaseError: the service cannot start; see `serve`.
    """
    if database.startswith("sqlite"):
        raise InputError("--processes needs PostgreSQL, see `--database`: an SQLite file is served by one process")
    over = threading.Event()
    before = {caught: signal.signal(caught, lambda *_: over.set()) for caught in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ExitStack() as running:
            listener = running.enter_context(listen(options.host, options.port))
            with open_database(database, timeouts=SERVING) as opened:
                checked(options, listener, opened)
            running.enter_context(logging_to_stderr(options.log_format, options.log_level))
            file = listener.fileno()
            command = _command(None if in_environment else database, options, file)
            supervisors = [Supervisor(command, _died, inherited=[file]) for _ in range(number)]
            for supervisor in supervisors:
                running.enter_context(supervisor)
            host, port = listener.getsockname()[:2]
            tell("serving", url=f"http://{f'[{host}]' if ':' in host else host}:{port}", processes=number)
            over.wait()
            for supervisor in supervisors:
                supervisor.terminate()
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def _died(event: str, **facts: Any) -> None:
    """Log that a process has died, and count its open streams no more."""
    mark_process_dead(facts["process"])  # type: ignore[no-untyped-call]
    tell(event, **facts)


def _command(database: str | None, options: ServiceOptions, listener: int) -> list[str]:
    """Return what starts one process with the same options, at a socket that it inherits."""
    pairs = [("--database", database)] if database is not None else []
    pairs += [("--host", options.host), ("--log-format", options.log_format)]
    pairs += [("--allow-host", name) for name in options.allowed_hosts]
    pairs += [("--allow-origin", origin) for origin in options.allowed_origins]
    pairs += [("--trusted-proxy", address) for address in options.trusted_proxies]
    pairs += [("--client-jobs", str(options.quota.queued)), ("--client-streams", str(options.quota.streams))]
    pairs += [("--client-bytes", str(options.quota.daily_bytes))]
    pairs += [("--listener", str(listener)), ("--parent", str(os.getpid()))]
    named = [word for pair in pairs for word in pair]
    return [sys.executable, "-m", "autotuner.cli", "serve", *named]
