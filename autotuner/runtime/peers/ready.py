"""Peers of a plan that are built before there is a plan, while its problem is being solved."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autotuner.ir.device import has_graphs
from autotuner.ir.models import Model
from autotuner.runtime.devices import device_runtime
from autotuner.runtime.peers.on_cpu import peers_on_cpu, torch_threads
from autotuner.runtime.peers.on_gpu import TimedStep, peers_on_gpu
from autotuner.runtime.peers.training_loop import TrainingLoop

FREE_SHARE = 0.5
"""Of a GPU's memory: peers are built early only where so much is free, and stay only where they leave so much of that.
The plan is measured beside them."""


@dataclass(frozen=True)
class ReadyPeers:
    """Peers that are built and warm, of a device of one type."""

    on_cpu: Mapping[str, TrainingLoop] | None = None
    on_gpu: Mapping[str, TimedStep] | None = None


def ready_peers(model: Model, device_type: str, threads: int | None = None) -> ReadyPeers | None:
    """Build the peers of a model's plans; None where a GPU has not much memory to spare.

    Args:
        threads: as in `time_peers`.
    """
    if not has_graphs(device_type):
        with torch_threads(threads):
            return ReadyPeers(on_cpu=peers_on_cpu(model))
    runtime = device_runtime(torch.device(device_type))
    before = runtime.free_bytes()
    if before is not None and before[0] < FREE_SHARE * before[1]:
        return None
    found = ReadyPeers(on_gpu=peers_on_gpu(model, device_type))
    left = runtime.free_bytes()
    return None if before and left and left[0] < FREE_SHARE * before[0] else found
