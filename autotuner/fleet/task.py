"""Tuning task: one attempt at a job, in a process of the cluster. It alone writes the job's results."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from autotuner.database import Database, FleetGpu, Job, open_database
from autotuner.errors import AutotunerError, DatabaseError, UnavailableError
from autotuner.fleet.fleet_measurer import Log
from autotuner.fleet.tuning import Fleet, FleetTuning
from autotuner.plan.request import Request
from autotuner.server.worker import run_job
from autotuner.settings import Settings
from autotuner.space import space_file

TOLD_AFTER_S = 60.0


class GpuReport:
    """State of the GPUs of a fleet as a job sees them: told by the thread that measures, stored by another one.

    GPUs of other names than the job's are those of other jobs: they are left out of this one, and of the report.
    """

    def __init__(self, database: Database, job: Job) -> None:
        self._database, self._job = database, job
        self._latest: Sequence[FleetGpu] = ()
        self._stored: tuple[float, Sequence[FleetGpu]] = (monotonic(), ())

    def tell(self, gpus: Sequence[FleetGpu]) -> None:
        kind, name = self._job.device_type, self._job.device_name
        name = name or next((gpu.device_name for gpu in gpus if gpu.used), None)
        self._latest = [
            gpu if gpu.device_type else replace(gpu, device_type=kind)
            for gpu in gpus
            if gpu.device_name in ("", name or gpu.device_name)
        ]

    def store(self) -> None:
        """Store what was told last, where it differs from what is stored, or that is a minute old."""
        latest, (stored_at, stored) = self._latest, self._stored
        if latest and (latest != stored or monotonic() - stored_at > TOLD_AFTER_S):
            self._database.gpus.report(str(self._job.worker), latest)
            self._stored = monotonic(), latest


def run_attempt(
    job_id: int, attempt: int, *, database: str, space: str | None, settings: Settings, fleet: Fleet, log: Log
) -> str:
    """Run an attempt at a job that a runner has taken, and return how it went, for the log.

    Nothing is done where another attempt has the job by now.
    """
    with open_database(database, make=False, log=log) as opened:
        job = opened.queue.job(job_id)
        if job.attempt != attempt or job.state != "running":
            return "job_lost"
        try:
            request = Request.from_json(job.request)
            file = space_file(request.device_type, space)
            gpus = GpuReport(opened, job)
            name = f"{job.id} of {job.created_at.isoformat()}"
            tuning = FleetTuning(
                fleet, request, settings, device_name=job.device_name, priority=job.priority, log=log,
                report=gpus.tell, job=name,
            )  # fmt: skip
        except AutotunerError as error:
            opened.queue.finish(job_id, attempt, "failed", message=str(error))
            return "job_failed"
        try:
            found = run_job(
                job, request, opened, file, settings, log=log, measuring=tuning.measuring, timing=tuning.timing,
                also=gpus.store,
            )  # fmt: skip
        except UnavailableError as error:
            log("job_given_up", error=str(error))
            return "job_given_up"
        except AutotunerError as error:
            log("job_failed", error=str(error))
            return "job_failed"
        finally:
            with suppress(DatabaseError):
                gpus.store()
        return "job_given_up" if found is None else "job_finished"
