"""A configuration as a runnable torch module; imports torch."""

from autotuner.errors import TunedWarning
from autotuner.runtime.adapter import DROPOUTS, Description
from autotuner.runtime.check import CheckReport, check
from autotuner.runtime.drop_in import apply, describe
from autotuner.runtime.fallbacks import Summary
from autotuner.runtime.framework import encoder_layer
from autotuner.runtime.module import TunedModule, restore, summary
from autotuner.runtime.overlap import with_measured_overlap
from autotuner.runtime.peers import ReadyPeers, peak_bytes, ready_peers, time_peers
from autotuner.runtime.training_step import TrainingStep

__all__ = [
    "DROPOUTS",
    "CheckReport",
    "Description",
    "ReadyPeers",
    "Summary",
    "TrainingStep",
    "TunedModule",
    "TunedWarning",
    "apply",
    "check",
    "describe",
    "encoder_layer",
    "peak_bytes",
    "ready_peers",
    "restore",
    "summary",
    "time_peers",
    "with_measured_overlap",
]
