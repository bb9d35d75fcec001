"""Workers: run jobs on the device of this host, one after another, and tell the database how far they are."""

from autotuner.server.worker.attending import (
    Measuring,
    Timing,
    measurer_ahead,
    measuring_with,
    run_job,
    runner_name,
    tune_attended,
)
from autotuner.server.worker.loop import run

__all__ = ["Measuring", "Timing", "measurer_ahead", "measuring_with", "run", "run_job", "runner_name", "tune_attended"]
