"""Commands that ask a service: submit a job, follow it, and get the best configuration."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from autotuner.cli.console import emit, err, out
from autotuner.cli.options import (
    Budget,
    Dtype,
    Extent,
    Json,
    NumericsOption,
    Option,
    Output,
    check_output,
    effort,
    given_extents,
    given_options,
    repetition,
    with_tuning,
)
from autotuner.cli.printing import print_configuration
from autotuner.cli.progress import Followed
from autotuner.errors import AutotunerError, NotFoundError
from autotuner.ir.numerics import checked_numerics
from autotuner.plan.phrases import KERNELS_OF_A_STEP, time_left, us
from autotuner.settings import TuneKeywords, parsed_bytes

if TYPE_CHECKING:
    from autotuner.server.client import Client
    from autotuner.server.wire.responses import BestView, JobView, ProgressView
    from autotuner.server.wire.values import JobStateName

commands = typer.Typer()

Asked = Annotated[
    str,
    typer.Argument(help="A model of the service, e.g. bert-encoder:tiny, or the path of a model file, which is sent."),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server", help="URL of the service.", show_default="$AUTOTUNER_SERVER, or else http://127.0.0.1:8000"
    ),
]
WantedDevice = Annotated[str, typer.Option(help="Device type to tune for.")]
DeviceName = Annotated[
    str | None,
    typer.Option(help="Name of one device, as GET /v1/devices lists it.", show_default="any of the type"),
]
JobId = Annotated[int, typer.Argument(help="Id of a job, as `submit` and `jobs` print it.")]


def client(server: str | None) -> "Client":
    """Return a client of the service that is named, or of that of the settings."""
    from autotuner.server.client import Client
    from autotuner.settings import Settings

    return Client(server or Settings.from_environment().server_url)


@commands.command()
@with_tuning(effort, repetition)
def submit(
    model: Asked,
    *,
    extent: Extent = None,
    option: Option = None,
    dtype: Dtype = None,
    device: WantedDevice = "cpu",
    device_name: DeviceName = None,
    tuning: TuneKeywords,
    priority: Annotated[
        int,
        typer.Option(
            help="Of jobs that wait, those of the highest are taken first; above 0 as admin.", min=-100, max=100
        ),
    ] = 0,
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="One job is stored under it, however often this is run.", show_default="a new one"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job until it has ended.")] = False,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Submit a tuning job to a service and print its id; with --wait, follow it and print the result.

    Ctrl-C ends only the waiting: the job goes on. With --wait, exit code 1 says that the job ended without a
    configuration. --json prints the job as the service describes it, with --wait as it ended.
    """
    with client(server) as asked:
        job = asked.submit(
            model, extents=given_extents(extent), options=given_options(option), dtype=dtype, device=device,
            device_name=device_name, priority=priority, idempotency_key=idempotency_key, **tuning,
        )  # fmt: skip
        _warn_if_nobody(asked, job, quiet=as_json)
        if wait:
            job = _followed(asked, job, quiet=as_json)
        if as_json:
            emit(job.model_dump(mode="json"))
        elif not wait:
            out.print(f"job {job.id}: {job.model}, {job.state}; `autotuner jobs {job.id}` shows it")
        elif job.configuration_id is not None:
            print_configuration(asked.configuration(job.configuration_id), as_json=False)
        if wait and job.configuration_id is None:
            err.print(f"job {job.id} {job.state}: {job.message}", soft_wrap=True)
            raise typer.Exit(1)


def _warn_if_nobody(asked: "Client", job: "JobView", *, quiet: bool) -> None:
    """Say so where no worker is up that could take a job: it would wait for as long as that stays."""
    if quiet:
        return
    try:
        devices = [device for device in asked.devices() if device.workers]
    except AutotunerError:
        return  # the job is submitted; what is missing here is only a hint
    if any(d.type == job.device_type and job.device_name in (None, d.name) for d in devices):
        return
    wanted = job.device_name or f"any device of type {job.device_type}"
    up = "; ".join(f"{device.name} ({device.type})" for device in devices) or "none at all"
    err.print(
        f"job {job.id} waits: no worker is up for {wanted}; up: {up}. `autotuner worker` starts one.",
        soft_wrap=True,
    )  # fmt: skip


def _followed(asked: "Client", job: "JobView", *, quiet: bool) -> "JobView":
    """Return a job as it ended; an interrupt ends the waiting only."""
    last = job
    try:
        with Followed(quiet=quiet) as show:
            for last in asked.events(job.id):
                show(last)
    except KeyboardInterrupt:
        err.print(
            f"job {job.id} goes on; `autotuner jobs {job.id}` shows it, `autotuner cancel {job.id}` ends it",
        )
        raise typer.Exit(130) from None
    return last


@commands.command()
def jobs(
    job_id: Annotated[int | None, typer.Argument(help="Show this job alone, with all that is known of it.")] = None,
    state: Annotated[
        str | None, typer.Option(help="Only those queued, running, finished, failed, cancelled or interrupted.")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 20,
    server: Server = None,
    as_json: Json = False,
) -> None:
    """List the jobs of a service, the newest first; or show one."""
    with client(server) as asked:
        if job_id is not None:
            job = asked.job(job_id)
            if as_json:
                emit(job.model_dump(mode="json"))
            else:
                _print_job(job)
            return
        found = list(asked.jobs(state=_state(state), limit=limit))
    if as_json:
        emit([job.model_dump(mode="json") for job in found])
    else:
        _print_jobs(found)


def _state(text: str | None) -> "JobStateName | None":
    from typing import cast, get_args

    from autotuner.errors import InputError
    from autotuner.server.wire.values import JobStateName

    if text is not None and text not in get_args(JobStateName):
        raise InputError(f"--state {text!r}: write one of {', '.join(get_args(JobStateName))}")
    return cast("JobStateName | None", text)


@commands.command()
def cancel(job_id: JobId, server: Server = None, as_json: Json = False) -> None:
    """Cancel a job: one that waits ends at once, one that runs in a moment; what was measured is kept."""
    with client(server) as asked:
        job = asked.cancel(job_id)
    if as_json:
        emit(job.model_dump(mode="json"))
    else:
        out.print(f"job {job.id}: {'running, and about to end' if not job.ended else job.state}")


@commands.command()
def gpus(server: Server = None, as_json: Json = False) -> None:
    """List the GPUs of fleets, and why some take no part."""
    with client(server) as asked:
        devices = [device for device in asked.devices() if device.gpus]
    if as_json:
        emit([{"type": d.type, "name": d.name, **gpu.model_dump(mode="json")} for d in devices for gpu in d.gpus])
        return
    table = Table("host", "GPU", "name", "measures", "reason", "seen")
    for device in devices:
        for gpu in device.gpus:
            used = "yes" if gpu.used else "no"
            table.add_row(gpu.host, gpu.slot, device.name or "unknown", used, gpu.reason, _moment(gpu.seen_at))
    out.print(table)


@commands.command()
def best(
    model: Asked,
    *,
    output: Output = None,
    extent: Extent = None,
    option: Option = None,
    dtype: Dtype = None,
    device: WantedDevice = "cpu",
    device_name: DeviceName = None,
    budget: Budget = None,
    numerics: NumericsOption = "exact",
    server: Server = None,
    as_json: Json = False,
) -> None:
    """Print the best configuration that a service knows, how good a match it is, and what differs.

    Matches: exact; doubtful, the same measured under bad conditions; near_device, tuned on another device;
    near_shape, tuned for other extents, which does not run with yours; none, with exit code 2. What was tuned with
    a budget, or with --numerics, is found with the same only. --output writes the configuration for `show`, `check`,
    `report` and autotuner.apply.
    """
    from autotuner.plan.configuration import Configuration, save_configuration

    check_output(output, model)
    with client(server) as asked:
        found = asked.best(
            model, extents=given_extents(extent), options=given_options(option), dtype=dtype, device=device,
            device_name=device_name, budget_bytes=parsed_bytes(budget, "--budget"),
            numerics=checked_numerics(numerics),
        )  # fmt: skip
    if as_json:
        emit(found.model_dump(mode="json"))
    if found.best is None:
        raise NotFoundError(found.message or f"no configuration is known for {model}")
    if output is not None:
        save_configuration(Configuration.from_json(found.best.configuration, "the service's configuration"), output)
    if not as_json:
        _print_best(found)
        if output is not None:
            out.print(f"Configuration written to {output}")


# What people see


def _print_best(found: "BestView") -> None:
    view = found.best
    assert view is not None
    table = Table("", "", show_header=False)
    table.add_row("match", found.match)
    if found.differs:
        table.add_row("differs in", ", ".join(found.differs))
    table.add_row("configuration", str(view.id))
    table.add_row("for", f"{view.dtype}  {_extents(view.extents)}")
    table.add_row("tuned on", f"{view.device_name} ({view.device_type}), {_moment(view.created_at)}")
    part = "with doubts, see below" if view.doubts else "in part: a job stopped at its limit or gap"
    table.add_row("measured", "all that could matter" if view.complete else part)
    table.add_row(KERNELS_OF_A_STEP, us(view.predicted_us))
    table.add_row("measured end to end", "no" if view.measured_us is None else us(view.measured_us))
    out.print(table)
    if found.message:
        out.print(found.message, soft_wrap=True)


def _print_jobs(found: "list[JobView]") -> None:
    table = Table("job", "state", "model", "progress", "best us", "created")
    for column in (0, 4):
        table.columns[column].justify = "right"
    for column in (0, 1, 3, 4, 5):
        table.columns[column].no_wrap = True
    for job in found:
        state, progress = "cancelling" if job.cancelling and not job.ended else job.state, job.progress
        stage = f"{progress.stage} {progress.done}/{progress.total}" if progress and not job.ended else ""
        table.add_row(
            str(job.id), "stalled" if job.stalled else state, f"{job.model} {job.dtype} {_extents(job.extents)}", stage,
            _us(progress.best_us if progress else None), f"{job.created_at.astimezone(UTC):%m-%d %H:%M}",
        )  # fmt: skip
    out.print(table)


def _print_job(job: "JobView") -> None:
    table = Table("", "", show_header=False, title=f"job {job.id}")
    rows = [
        ("state", _job_state(job)),
        ("stalled", job.stalled),
        ("waits for", "" if job.waits_for is None else f"job {job.waits_for}, which has the same request"),
        ("model", f"{job.model}  {job.dtype}  {_extents(job.extents)}"),
        ("options", " ".join(f"{name}={value}" for name, value in job.options.items())),
        ("device", f"{job.device_type}, {job.device_name or 'any'}"),
        ("stops at", _stops(job)),
        ("measures", "everything" if job.exhaustive else ""),
        ("budget", "" if job.budget_bytes is None else f"{job.budget_bytes:,} bytes"),
        ("numerics", "" if job.numerics == "exact" else job.numerics),
        ("priority", str(job.priority) if job.priority else ""),
        ("worker", job.worker or "none yet"),
        ("attempt", str(job.attempt) if job.attempt > 1 else ""),
        ("created", _moment(job.created_at)),
        ("started", _moment(job.started_at)),
        ("ended", _moment(job.finished_at)),
        *_progress_rows(job),
        ("counts", ", ".join(f"{name} {count:,}" for name, count in job.counts.items())),
        ("configuration", "none" if job.configuration_id is None else str(job.configuration_id)),
        ("message", job.message),
    ]
    for name, text in rows:
        if text:
            table.add_row(name, text)
    out.print(table)


def _progress_rows(job: "JobView") -> list[tuple[str, str]]:
    progress = job.progress
    if progress is None or job.ended:
        return []
    left = time_left(progress.eta_s, progress.left_s)
    return [
        ("stage", f"{progress.stage}, {progress.done:,} of {progress.total:,}" + (f", {left}" if left else "")),
        ("calls", f"{progress.measured:,} measured, {progress.reused:,} reused, {progress.failed:,} failed"),
        ("best so far", _best(progress)),
    ]


def _best(progress: "ProgressView") -> str:
    """Say how long the best plan so far takes, and by what share it may be longer than the best there can be."""
    if not progress.best_us:
        return ""
    expected = "" if progress.estimated_gap is None else f", {_share(progress.estimated_gap)} by estimate"
    return f"{_us(progress.best_us)} us, gap {_share(progress.gap)}{expected}"


def _job_state(job: "JobView") -> str:
    return f"{job.state}, to be cancelled" if job.cancelling and not job.ended else job.state


def _stops(job: "JobView") -> str:
    limits = [
        ("gap", job.gap, ""), ("estimated gap", job.estimated_gap, ""), ("", job.limits.seconds, " s"),
        ("", job.limits.measurements, " measurements"),
    ]  # fmt: skip
    return ", ".join(f"{name} {value:g}{unit}".strip() for name, value, unit in limits if value is not None)


def _extents(extents: "dict[str, int]") -> str:
    return " ".join(f"{axis}={extent}" for axis, extent in extents.items())


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _moment(at: datetime | None) -> str:
    return "" if at is None else at.astimezone(UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", " UTC")
