"""Tuning task: one attempt at a job, in a process of the cluster. It alone writes the job's results."""

from autotuner.database import open_database
from autotuner.errors import AutotunerError, UnavailableError
from autotuner.fleet.fleet_measurer import Log
from autotuner.fleet.tuning import Fleet, FleetTuning
from autotuner.plan.request import Request
from autotuner.server.worker import run_job
from autotuner.settings import Settings
from autotuner.space import space_file


def run_attempt(
    job_id: int, attempt: int, database: str, space: str | None, settings: Settings, fleet: Fleet, log: Log
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
            tuning = FleetTuning(fleet, request, settings, job.device_name, job.priority, log)
        except AutotunerError as error:
            opened.queue.finish(job_id, attempt, "failed", message=str(error))
            return "job_failed"
        try:
            found = run_job(
                job, request, opened, file, settings, log=log, measuring=tuning.measuring, timing=tuning.timing
            )
        except UnavailableError as error:
            log("job_given_up", error=str(error))
            return "job_given_up"
        except AutotunerError as error:
            log("job_failed", error=str(error))
            return "job_failed"
        return "job_given_up" if found is None else "job_finished"
