"""Runner: takes jobs from the queue and has tasks of a Ray cluster run them, until it is ended."""

import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from autotuner.database import Job, open_database
from autotuner.errors import DatabaseError
from autotuner.fleet.cluster import FleetDevices, cluster_name, connected
from autotuner.fleet.fleet_measurer import Log, silent
from autotuner.fleet.head import WAIT_S
from autotuner.fleet.ray_tasks import RayTasks
from autotuner.fleet.reconciling import Reconciler
from autotuner.fleet.task import run_attempt
from autotuner.fleet.tuning import Fleet
from autotuner.server.logs import bound, logging_to_stderr, tell
from autotuner.settings import Settings, database_url

LOOK_S = 0.5
GREET_S = 5.0
BROKEN_S = 5.0


def run_fleet(
    fleet: Fleet,
    database: str | Path | None = None,
    *,
    device: str = "cuda",
    space: str | Path | None = None,
    jobs: int | None = None,
    once: bool = False,
    log: Log = silent,
) -> None:
    """Take jobs and run them over a fleet, until an exception that is no error ends it (SystemExit, KeyboardInterrupt).

    One runner serves a cluster. One that starts after another was killed goes on with the jobs of that one.

    Args:
        fleet: the cluster.
        database: URL or path of an SQLite file; by default `AUTOTUNER_DATABASE` or ./autotuner.sqlite.
        device: device type.
        space: path of a search space file, on the host of each task; by default that of the device type.
        jobs: that run at once at most; by default one per GPU.
        once: end when no job waits or runs.
        log: called with an event and facts.

    Raises:
        LockHeldError: the cluster has a runner.
        AutotunerError: the runner cannot start.
    """
    settings = Settings.from_environment()
    url = database_url(database if database is not None else settings.database_url)
    with connected(fleet.address, fleet.gpus, wait_s=WAIT_S, log=log), open_database(url, log=log) as opened:
        name = cluster_name()
        devices = FleetDevices(fleet.probe(device, settings))
        start = partial(_arguments, url, space, settings, fleet)
        tasks = RayTasks(_attempt, start)
        with opened.locks.hold(name) as held:
            room = (lambda: devices.gpus) if jobs is None else (lambda: jobs)
            reconciler = Reconciler(
                opened.queue, held, tasks, devices=devices.known, room=room, log=log, clock=time.monotonic
            )
            log("worker_started", worker=name)
            greeted_at = -GREET_S
            opened.gpus.forget(name)
            try:
                while True:
                    try:
                        if time.monotonic() - greeted_at > GREET_S:
                            for device_type, device_name in devices.known():
                                opened.queue.greet(name, device_type, device_name)
                            opened.gpus.keep(name, devices.nodes(), devices.failing())
                            greeted_at = time.monotonic()
                        busy = reconciler.step()
                    except DatabaseError as error:
                        log("database_failed", error=str(error), retry_after_s=BROKEN_S)
                        time.sleep(BROKEN_S)
                        continue
                    if once and not busy and devices.known() and held.is_held:
                        return
                    time.sleep(LOOK_S)
            finally:
                log("worker_ended", worker=name)
                tasks.kill_all()
                try:
                    for job in opened.queue.running(name):
                        opened.queue.release(job.id, job.attempt)
                    opened.queue.leave(name)
                    opened.gpus.forget(name)
                except DatabaseError as error:
                    log("database_failed", error=str(error))


def _arguments(url: str, space: str | Path | None, settings: Settings, fleet: Fleet, job: Job) -> str:
    """Return what a task needs to know, as text: nothing of ours is pickled."""
    known = asdict(settings) | {"cache_dir": str(settings.cache_dir)}
    return json.dumps({
        "job_id": job.id, "attempt": job.attempt, "database": url, "space": None if space is None else str(space),
        "settings": known, "fleet": asdict(fleet),
    })  # fmt: skip


def _attempt(text: str) -> str:
    """Run what `_arguments` says, in a task's process, whose log Ray keeps with its others."""
    value: dict[str, Any] = json.loads(text)
    known = value["settings"]
    settings = Settings(
        **{**known, "cache_dir": Path(known["cache_dir"]), "allowed_hosts": tuple(known["allowed_hosts"])}
    )
    number, attempt = value["job_id"], value["attempt"]
    with logging_to_stderr("json"), bound(job=number, attempt=attempt):
        return run_attempt(
            number, attempt, database=value["database"], space=value["space"], settings=settings,
            fleet=Fleet(**value["fleet"]), log=tell,
        )  # fmt: skip
