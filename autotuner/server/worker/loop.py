"""The loop of a worker: take a job for this device, run it, take the next."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from autotuner.database import Database, Device, Hold, Job, open_database
from autotuner.errors import AutotunerError, DatabaseError, UnavailableError
from autotuner.extras import require
from autotuner.measure import Measurer
from autotuner.measure.devices import device_of, environment
from autotuner.plan.request import Request
from autotuner.server.worker.attending import run_job, runner_name, silent, told
from autotuner.server.worker.reporting import Log
from autotuner.settings import Settings
from autotuner.space import SpaceFile, space_file

LOOK_S = 0.5
GREET_S = 10.0
BROKEN_S = 5.0


def run(
    database: str | Path | None = None,
    *,
    device: str = "cpu",
    threads: int | None = None,
    space: str | Path | None = None,
    once: bool = False,
    log: Log = silent,
) -> None:
    """Take and run jobs until an exception that is no error ends it (SystemExit, KeyboardInterrupt).

    A job in hand then goes back to the queue.

    Args:
        database: URL or path of an SQLite file; by default `AUTOTUNER_DATABASE` or ./autotuner.sqlite.
        device: device type, such as "cpu".
        threads: that a kernel may use; by default `AUTOTUNER_THREADS` or all cores.
        space: path of a search space file; by default that of the device type.
        once: end when no job waits.
        log: called with an event and facts.

    Raises:
        AutotunerError: the worker cannot start, or cannot measure. What goes wrong with a job is stored with it and
            ends only the job.
    """
    settings = Settings.from_environment()
    settings = replace(settings, threads=threads if threads is not None else settings.threads)
    require("a worker", "torch")
    here, memory_bytes = environment(device, settings.threads), device_of(device).memory_bytes
    file = space_file(device, space)
    name = runner_name()
    with open_database(database if database is not None else settings.database_url, log=log) as opened:
        with Measurer(
            threads=settings.threads, timeout_s=settings.timeout_s, device_type=device, cache_dir=settings.cache_dir
        ) as measurer:
            measurer.start()  # a worker that cannot measure takes no job to fail it
        queue = opened.queue

        def greet() -> None:
            queue.greet(name, here.device_type, here.device_name, memory_bytes)

        def run_one(job: Job) -> None:
            _run(job, opened, file, settings, greet, log)

        with opened.locks.hold(name) as held:
            log("worker_started", worker=name, device_type=here.device_type, device_name=here.device_name)
            try:
                _take_jobs(opened, held, [(here.device_type, here.device_name)], run_one, greet, log, once=once)
            finally:
                log("worker_ended", worker=name)
                try:
                    queue.leave(name)
                except DatabaseError as error:
                    log("database_failed", error=str(error))


def _take_jobs(
    database: Database,
    held: Hold,
    devices: Sequence[Device],
    run_one: Callable[[Job], None],
    greet: Callable[[], None],
    log: Log,
    *,
    once: bool,
) -> None:
    """Take jobs for these devices and run them, one after another; with `once`, until none waits."""
    greeted_at = -GREET_S
    while True:
        try:
            if time.monotonic() - greeted_at > GREET_S:
                greet()
                greeted_at = time.monotonic()
            # What is taken without the lock, the next worker would take for left behind.
            jobs = database.queue.claim(held.name, devices) if held.is_held else []
        except DatabaseError as error:
            log("database_failed", error=str(error), retry_after_s=BROKEN_S)
            time.sleep(BROKEN_S)
            _reopen(database, log)
            continue
        for job in jobs:
            run_one(job)
        if not jobs and once and held.is_held:
            return
        if not jobs:
            time.sleep(LOOK_S)


def _reopen(database: Database, log: Log) -> None:
    """Go on with the database that is there now, between two jobs: its file may have been replaced."""
    try:
        database.reopen()
    except DatabaseError as error:
        log("database_failed", error=str(error))


def _run(
    job: Job,
    database: Database,
    file: SpaceFile,
    settings: Settings,
    greet: Callable[[], None],
    log: Log,
) -> None:
    log("job_taken", job=job.id, model=job.model, attempt=job.attempt)
    try:
        try:
            request = Request.from_json(job.request)
        except AutotunerError as error:
            database.queue.finish(job.id, job.attempt, "failed", message=told(error))
            raise
        found = run_job(job, request, database, file, settings, also=greet, log=log)
    except UnavailableError as error:
        log("job_given_up", job=job.id, error=str(error))
    except AutotunerError as error:
        log("job_failed", job=job.id, error=str(error))
    except Exception as error:  # a job never ends the worker
        log("job_failed", job=job.id, error=f"{type(error).__name__}: {error}")
    else:
        if found is None:
            log("job_given_up", job=job.id)
        else:
            log("job_finished", job=job.id, predicted_us=found.certificate.predicted_us)
