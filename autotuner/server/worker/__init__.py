"""Workers: run jobs on the device of this host, one after another, and tell the database how far they are."""

from autotuner.server.worker.attending import tune_attended
from autotuner.server.worker.loop import run

__all__ = ["run", "tune_attended"]
