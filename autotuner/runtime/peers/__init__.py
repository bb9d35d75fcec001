"""One training step of a configuration against its peers, interleaved in one run; see the file of each device."""

from collections.abc import Mapping, Sequence
from statistics import median

from autotuner.ir.device import has_graphs
from autotuner.plan.configuration import Configuration
from autotuner.plan.parts import Measured
from autotuner.runtime.peers.beside_kernels import BesideKernels
from autotuner.runtime.peers.on_cpu import time_on_cpu
from autotuner.runtime.peers.on_gpu import CAPTURED, OURS, PLAN, time_on_gpu
from autotuner.runtime.peers.ready import ReadyPeers, ready_peers
from autotuner.runtime.peers.training_loop import peak_bytes

__all__ = ["ReadyPeers", "as_measured", "peak_bytes", "ready_peers", "time_peers"]


def time_peers(
    configuration: Configuration,
    samples: int = 50,
    threads: int | None = None,
    ready: ReadyPeers | None = None,
    *,
    settled_share: float = 0.0,
) -> Measured:
    """Time a configuration's training step and its peers', interleaved, on the configuration's device.

    Args:
        configuration: what to run.
        samples: turns timed of each, at most.
        threads: that torch may use meanwhile; as set, if None.
        ready: the peers, where they were built before.
        settled_share: fewer turns do where each median is known so well, as by `training_loop.rounds`.

    Returns:
        Medians in microseconds, and what a step allocates at most, in bytes. A peer that cannot run here, or not be
        compiled, is missing, with a warning.
    """
    ready = ready or ReadyPeers()
    if has_graphs(configuration.device_type):
        return as_measured(*time_on_gpu(configuration, samples, ready.on_gpu, settled_share))
    return as_measured(*time_on_cpu(configuration, samples, threads, ready.on_cpu, settled_share))


def as_measured(
    times_us: Mapping[str, Sequence[float]], peaks_bytes: Mapping[str, int | None], beside: BesideKernels
) -> Measured:
    """Return the times of all sides as a configuration keeps them.

    The captured form stands for the plan, as what lies beside its kernels is of that form; without it, the fastest.
    """
    medians_us = {name: median(times) for name, times in times_us.items()}
    forms = [name for name in OURS if name in medians_us]
    plan = PLAN + CAPTURED if PLAN + CAPTURED in forms else min(forms, key=medians_us.__getitem__)
    return Measured(
        medians_us[plan],
        beside.overhead_us,
        {name: us for name, us in medians_us.items() if name not in OURS},
        len(times_us[plan]),
        peaks_bytes[plan],
        {name: peaks_bytes[name] for name in medians_us if name not in OURS},
        beside.switching_us,
        beside.slowdown,
    )
