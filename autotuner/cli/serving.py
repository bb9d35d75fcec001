"""Commands that stay: the service, and a worker."""

import atexit
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from autotuner.cli.fleet import Address, FleetArguments, FleetMeasurerOption, FleetOption, Gpus, given_fleet
from autotuner.cli.options import DatabaseOption, Threads
from autotuner.errors import InputError
from autotuner.extras import require

if TYPE_CHECKING:
    from autotuner.settings import LogFormat, Settings

commands = typer.Typer()

LogFormatOption = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        help="words, json, or auto: words at a terminal, JSON lines elsewhere.",
        show_default="$AUTOTUNER_LOG_FORMAT, or else auto",
    ),
]
ServedDevice = Annotated[str, typer.Option(help="Device type that the worker takes jobs for; see `devices`.")]


@commands.command()
def serve(
    *,
    database: DatabaseOption = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen at; 0.0.0.0 for all of this machine, which takes a token.",
            show_default="$AUTOTUNER_HOST, or else 127.0.0.1",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any free one.", min=0, max=65535)] = 8000,
    with_worker: Annotated[
        bool, typer.Option("--with-worker", help="Run a worker for this machine as well, and keep it running.")
    ] = False,
    device: ServedDevice = "cpu",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="A name that clients may ask the service under, beside localhost and that of --host. Repeatable.",
            show_default="$AUTOTUNER_ALLOWED_HOSTS",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin", help="A site whose pages may ask the service, e.g. https://tuning.example. Repeatable."
        ),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy", help="Address or network of a proxy whose X-Forwarded-For is believed. Repeatable."
        ),
    ] = None,
    client_jobs: Annotated[int, typer.Option(help="Jobs of one client that may wait for a worker.", min=1)] = 100,
    client_streams: Annotated[int, typer.Option(help="Event streams that one client may have open.", min=1)] = 64,
    client_bytes: Annotated[
        str, typer.Option(help="Bytes of jobs that one client may submit in 24 hours, e.g. 64MiB.")
    ] = "64MiB",
    processes: Annotated[int, typer.Option(help="Processes that answer; more than one needs PostgreSQL.", min=1)] = 1,
    log_format: LogFormatOption = None,
    listener: Annotated[int | None, typer.Option(hidden=True)] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve the HTTP API under http://HOST:PORT/v1 until Ctrl-C or SIGTERM.

    Clients submit jobs, workers on any machine with the same database run them. With --with-worker one runs here: it is
    started anew when it dies, and ends with the server; where it could not measure, for want of torch or of the device,
    nothing is started. /docs describes the API.

    Where others than this machine could ask, the database must have a token: see `autotuner token create`.
    """
    from autotuner.settings import Settings, parsed_bytes

    settings = Settings.from_environment()
    form = _log_format(log_format, settings)
    if processes > 1:
        os.environ[METRICS_FOLDER] = _metrics_folder()
    from autotuner.server.http import Quota, ServiceOptions
    from autotuner.server.http import serve as run

    options = ServiceOptions(
        host=host or settings.host, port=port, allowed_hosts=allow_host or settings.allowed_hosts,
        allowed_origins=allow_origin or (), trusted_proxies=trusted_proxy or (),
        quota=Quota(client_jobs, client_streams, parsed_bytes(client_bytes, "--client-bytes") or 0), log_format=form,
    )  # fmt: skip
    url = database or settings.database_url
    if parent is not None:
        from autotuner.cli.supervisor import end_with

        end_with(parent)
    with ExitStack() as beside:
        if with_worker:
            from autotuner.cli.supervisor import Supervisor
            from autotuner.measure.devices import environment
            from autotuner.server.logs import tell

            require("a worker", "torch")
            environment(device)
            beside.enter_context(_ending_on_sigterm())
            beside.enter_context(Supervisor(_worker_command(database, device, form), tell))
        if processes == 1:
            run(url, options, listener=None if listener is None else socket.socket(fileno=listener))
        else:
            from autotuner.cli.processes import run_processes

            run_processes(url, options, processes, in_environment=database is None)


METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def _metrics_folder() -> str:
    """Return a new folder in which the processes of a service gather their metrics; it goes when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="autotuner-metrics-")
    atexit.register(folder.cleanup)
    return folder.name


def _log_format(given: str | None, settings: "Settings") -> "LogFormat":
    """Return the form of the log that is given, or that of the settings."""
    if given is None:
        return settings.log_format
    from autotuner.settings import LogFormat

    if given in get_args(LogFormat):
        return cast("LogFormat", given)
    raise InputError(f"--log-format {given!r}: write auto, words or json")


def _worker_command(database: str | None, device: str, form: str) -> list[str]:
    """Return what starts a worker; the database comes with the environment unless it was named."""
    named = [] if database is None else ["--database", database]
    return [
        sys.executable,
        "-m",
        "autotuner.cli",
        "worker",
        "--device",
        device,
        *named,
        "--log-format",
        form,
        "--parent",
        str(os.getpid()),
    ]


@commands.command()
def worker(
    *,
    database: DatabaseOption = None,
    device: ServedDevice = "cpu",
    threads: Threads = None,
    space: Annotated[Path | None, typer.Option(help="A search space file.", show_default="that of the device")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when no job waits.")] = False,
    fleet: FleetOption = False,
    address: Address = None,
    gpus: Gpus = None,
    measurer: FleetMeasurerOption = None,
    measurer_arguments: FleetArguments = None,
    log_format: LogFormatOption = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Take jobs from the database and run them on a device of this machine, until Ctrl-C or SIGTERM.

    A job that it leaves goes to the next worker, which goes on from what was measured; so nothing is lost with kill -9.
    With --fleet, it runs jobs on all GPUs of a Ray cluster, several at a time; a cluster has one such worker.
    """
    if parent is not None:
        from autotuner.cli.supervisor import end_with

        end_with(parent)
    from autotuner.server.logs import WorkerLog, logging_to_stderr
    from autotuner.settings import Settings

    over = given_fleet(fleet, address, gpus, device, measurer, measurer_arguments)
    logging = logging_to_stderr(_log_format(log_format, Settings.from_environment()))
    if over is not None:
        from autotuner.fleet.running import run_fleet

        with logging, _ending_on_sigterm():
            run_fleet(over, database, device=device, space=space, once=once, log=WorkerLog())
        return
    from autotuner.server.worker import run

    with logging, _ending_on_sigterm():
        run(database, device=device, threads=threads, space=space, once=once, log=WorkerLog())


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process by an exception, so that what runs beside it ends first, and a job is put back."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
