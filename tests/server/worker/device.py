"""A replay in the place of a device, and jobs that a worker has taken."""

from typing import Any

from autotuner.database import Database, Job
from autotuner.ir.models import Model
from autotuner.measure.devices import environment
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Measured
from autotuner.plan.request import Request
from autotuner.server.worker.attending import run_job
from autotuner.settings import Settings, TuneOptions
from autotuner.tuner import Replay, TuningPolicy
from autotuner.tuner.policy import DEFAULT_POLICY
from tests.made_up import CPU

WORKER = "a worker"
NAME = environment("cpu").device_name


class Device(Replay):
    """A replay with what the worker asks of a measurer."""

    def start(self) -> None:
        pass

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class NoProcess:
    """Stands for the process that times end to end, and keeps what was asked of it."""

    def __init__(self, *, compiles: bool) -> None:
        self.compiles = compiles
        self.asked: list[tuple[object, ...]] = []
        self.is_closed = False

    def get_ready(self, *about: object) -> None:
        self.asked.append(about)

    def close(self) -> None:
        self.is_closed = True


def enqueue(database: Database, model: Model, **asked: Any) -> Job:
    request = Request(model, options=TuneOptions(**asked))
    return database.queue.enqueue(model=model.reference, request=request.to_json(), device_type="cpu")


def taken(database: Database) -> Job:
    """Return the next job, as a worker takes it."""
    (job,) = database.queue.claim(WORKER, [("cpu", NAME)])
    return job


def run_taken(
    job: Job, database: Database, watch: Any = lambda _: None, policy: TuningPolicy = DEFAULT_POLICY
) -> Configuration | None:
    request = Request.from_json(job.request)
    with database.locks.hold(WORKER):
        return run_job(job, request, database, CPU, Settings(), watch=watch, policy=policy)


def timed(configuration: Configuration, *_: object, **__: object) -> Configuration:
    """Stand for timing end to end."""
    return configuration.with_measured(Measured(50.0, 5.0, {"eager": 100.0}, 30))
