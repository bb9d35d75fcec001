"""One training step of a configuration against its peers, interleaved in one run; see the file of each device."""

from autotuner.plan.configuration import Configuration, Measured
from autotuner.runtime.peers.on_cpu import time_on_cpu
from autotuner.runtime.peers.on_cuda import Timing, as_measured, overhead_us, time_on_cuda

__all__ = ["Timing", "as_measured", "overhead_us", "time_on_cuda", "time_peers"]


def time_peers(configuration: Configuration, samples: int = 50, threads: int | None = None) -> Measured:
    """Time a configuration's training step and its peers', interleaved, on the configuration's device.

    Args:
        configuration: what to run.
        samples: turns timed of each.
        threads: that torch may use meanwhile; as set, if None.

    Returns:
        Medians in microseconds, and what a step allocates at most, in bytes. A peer that cannot run here, or not be
        compiled, is missing, with a warning.

    Raises:
        ConfigurationError: the framework has no layer for the configuration's model.
    """
    if configuration.environment["device_type"] == "cuda":
        return as_measured(time_on_cuda(configuration, samples), samples, overhead_us(configuration, samples))
    return time_on_cpu(configuration, samples, threads)
