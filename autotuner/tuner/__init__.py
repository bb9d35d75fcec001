"""From a model to its configuration. Knows no torch and no device: it asks a measurer that it is given, or a replay."""

from autotuner.tuner.answer import build_configuration, default_us, kernels_by_cover, with_measured
from autotuner.tuner.asked import Asked, Progress, Replay, Watch
from autotuner.tuner.measuring import STORE_AFTER_RESULTS, measure_missing
from autotuner.tuner.walk import NOISE_FLOOR, request_key, save, tune

__all__ = [
    "NOISE_FLOOR",
    "STORE_AFTER_RESULTS",
    "Asked",
    "Progress",
    "Replay",
    "Watch",
    "build_configuration",
    "default_us",
    "kernels_by_cover",
    "measure_missing",
    "request_key",
    "save",
    "tune",
    "with_measured",
]
