"""Peers of a plan that are built before there is a plan, while its problem is being solved."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autotuner.ir.device import CUDA
from autotuner.ir.models import Model
from autotuner.runtime.peers.on_cpu import peers_on_cpu, torch_threads
from autotuner.runtime.peers.on_cuda import TimedStep, peers_on_cuda
from autotuner.runtime.peers.training_loop import TrainingLoop

FREE_SHARE = 0.5
"""Of a GPU's memory: peers are built early only where so much is free, and stay only where they leave so much of that.
The plan is measured beside them."""


@dataclass(frozen=True)
class ReadyPeers:
    """Peers that are built and warm, of a device of one type."""

    on_cpu: Mapping[str, TrainingLoop] | None = None
    on_cuda: Mapping[str, TimedStep] | None = None


def ready_peers(model: Model, device_type: str, threads: int | None = None) -> ReadyPeers | None:
    """Build the peers of a model's plans; None where a GPU has not much memory to spare.

    Args:
        threads: as in `time_peers`.
    """
    if device_type != CUDA:
        with torch_threads(threads):
            return ReadyPeers(on_cpu=peers_on_cpu(model))
    free_bytes, all_bytes = torch.cuda.mem_get_info()
    if free_bytes < FREE_SHARE * all_bytes:
        return None
    found = ReadyPeers(on_cuda=peers_on_cuda(model))
    return found if torch.cuda.mem_get_info()[0] >= FREE_SHARE * free_bytes else None
