"""A configuration as a runnable torch module; imports torch."""

from autotuner.runtime.adapters import Description
from autotuner.runtime.adapters.adapter import DROPOUTS
from autotuner.runtime.check import CheckReport, check
from autotuner.runtime.framework import encoder_layer
from autotuner.runtime.module import TunedModule, apply, describe, restore
from autotuner.runtime.peers import peak_bytes, time_peers
from autotuner.runtime.reason import TunedWarning
from autotuner.runtime.tally import Summary, summary
from autotuner.runtime.training_step import TrainingStep

__all__ = [
    "DROPOUTS",
    "CheckReport",
    "Description",
    "Summary",
    "TrainingStep",
    "TunedModule",
    "TunedWarning",
    "apply",
    "check",
    "describe",
    "encoder_layer",
    "peak_bytes",
    "restore",
    "summary",
    "time_peers",
]
