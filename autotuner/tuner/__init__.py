"""From a model to its configuration. Knows no torch and no device: it asks a measurer that it is given, or a replay."""

from autotuner.tuner.answer import build_configuration
from autotuner.tuner.asked import NOTHING_SPENT, Asked, Progress, Replay, Spent, Stage, Watch
from autotuner.tuner.cells import cell_counts, with_known_calls
from autotuner.tuner.measuring import STORE_AFTER_RESULTS
from autotuner.tuner.walk import NOISE_FLOOR, Tuned, request_key, save, tune

__all__ = [
    "NOISE_FLOOR",
    "NOTHING_SPENT",
    "STORE_AFTER_RESULTS",
    "Asked",
    "Progress",
    "Replay",
    "Spent",
    "Stage",
    "Tuned",
    "Watch",
    "build_configuration",
    "cell_counts",
    "request_key",
    "save",
    "tune",
    "with_known_calls",
]
