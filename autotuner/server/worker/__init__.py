"""Workers: run jobs on the device of this host, one after another, and tell the database how far they are."""

from autotuner.server.worker.attending import Measuring, Timing, run_job, runner_name, tune_attended
from autotuner.server.worker.loop import run

__all__ = ["Measuring", "Timing", "run", "run_job", "runner_name", "tune_attended"]
