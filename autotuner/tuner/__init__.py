"""Tuning, from a model to its configuration, with a measurer or a replay. Imports no torch and no device."""

from autotuner.tuner.answer import build_configuration
from autotuner.tuner.costliest import PlannedCall, costliest_steps
from autotuner.tuner.policy import TuningPolicy
from autotuner.tuner.progress import NOTHING_SPENT, MeasurerProtocol, Progress, Replay, Spent, Stage, Watch
from autotuner.tuner.searching import cell_counts, with_known_calls
from autotuner.tuner.tuning import NOISE_FLOOR, Tuned, request_key, save, tune

__all__ = [
    "NOISE_FLOOR",
    "NOTHING_SPENT",
    "MeasurerProtocol",
    "PlannedCall",
    "Progress",
    "Replay",
    "Spent",
    "Stage",
    "Tuned",
    "TuningPolicy",
    "Watch",
    "build_configuration",
    "cell_counts",
    "costliest_steps",
    "request_key",
    "save",
    "tune",
    "with_known_calls",
]
