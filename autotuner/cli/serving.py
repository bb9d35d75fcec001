"""Commands that stay: the service, and a worker."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from autotuner.cli.console import err
from autotuner.cli.fleet import Address, FleetArguments, FleetMeasurerOption, FleetOption, Gpus, given_fleet
from autotuner.cli.options import DatabaseOption, Threads

commands = typer.Typer()

ServedDevice = Annotated[str, typer.Option(help="Device type that the worker takes jobs for; see `devices`.")]


@commands.command()
def serve(
    database: DatabaseOption = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen at; 0.0.0.0 for all of this machine.",
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
) -> None:
    """Serve the HTTP API under http://HOST:PORT/v1 until Ctrl-C or SIGTERM.

    Clients submit jobs, workers on any machine with the same database run them. With --with-worker one runs here: it is
    started anew when it dies, and ends with the server; where it could not measure, for want of torch or of the device,
    nothing is started. /docs describes the API.
    """
    from autotuner.server.http import serve as run
    from autotuner.settings import Settings

    settings = Settings.from_environment()
    url = database or settings.database_url
    with ExitStack() as beside:
        if with_worker:
            from autotuner.cli.supervisor import Supervisor
            from autotuner.measure.devices import check_torch, environment

            check_torch()
            environment(device)
            beside.enter_context(_ending_on_sigterm())
            beside.enter_context(Supervisor(_worker_command(database, device), tell))
        run(url, host=host or settings.host, port=port, allowed_hosts=allow_host or settings.allowed_hosts)


def _worker_command(database: str | None, device: str) -> list[str]:
    """Return what starts a worker; the database comes with the environment unless it was named."""
    named = [] if database is None else ["--database", database]
    return [sys.executable, "-m", "autotuner.cli", "worker", "--device", device, *named, "--parent", str(os.getpid())]


@commands.command()
def worker(
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
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Take jobs from the database and run them on a device of this machine, until Ctrl-C or SIGTERM.

    A job that it leaves goes to the next worker, which goes on from what was measured; so nothing is lost with kill -9.
    With --fleet, it runs jobs on all GPUs of a Ray cluster, several at a time; a cluster has one such worker.
    """
    if parent is not None:
        from autotuner.cli.supervisor import end_with

        end_with(parent)
    over = given_fleet(fleet, address, gpus, device, measurer, measurer_arguments)
    if over is not None:
        from autotuner.fleet.running import run_fleet

        with _ending_on_sigterm():
            run_fleet(over, database, device=device, space=space, once=once, log=tell)
        return
    from autotuner.server.worker import run

    with _ending_on_sigterm():
        run(database, device=device, threads=threads, space=space, once=once, log=tell)


def tell(event: str, **facts: Any) -> None:
    """Write one line of a log on standard error: when, what, and the facts that go with it."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    words = [now, event, *(f"{name}={value!r}" for name, value in facts.items())]
    err.print(" ".join(words), markup=False, highlight=False, soft_wrap=True)


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
