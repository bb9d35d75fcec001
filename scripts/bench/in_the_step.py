"""The time of each kernel step of a configuration where it runs: inside of the whole training step on CUDA."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from time import sleep

import torch

from autotuner.plan.configuration import Configuration
from autotuner.runtime.devices import DeviceRuntime, Run, device_runtime
from autotuner.runtime.overlap import PlanVariants

REPLAYS = 20
PAUSE_S = 0.2
"""Before each round, so that load does not last and lower the clock."""


def in_the_step_us(configuration: Configuration) -> list[float]:
    """Return what each step takes within the training step, one step after the other, in microseconds.

    For each step, one graph of the whole training step records an event at its begin and one behind that step. The
    difference of two neighbours is the time of one. All graphs run the same kernels over the same memory, so each step
    finds the caches as its neighbours leave them.
    """
    variants = PlanVariants(configuration)
    runs = variants.runs()
    runtime = device_runtime(torch.device("cuda"))
    timed = [_Timed(runtime, runs, count) for count in range(len(runs) + 1)]
    ends: list[list[float]] = [[] for _ in timed]
    for _ in range(REPLAYS):
        sleep(PAUSE_S)
        for place, each in enumerate(timed):
            ends[place].append(each.us())
    until = [median(found) for found in ends]
    return [after - before for before, after in pairwise(until)]


class _Timed:
    """A graph of all steps, with an event before the first one and one behind so many."""

    def __init__(self, runtime: DeviceRuntime, runs: Sequence[Run], count: int) -> None:
        self._begun, self._ended = (
            torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        schedule = [self._begun.record, *runs[:count], self._ended.record, *runs[count:]]
        self._replay = runtime.captured(partial(_run, schedule), runtime.pool())

    def us(self) -> float:
        self._replay()
        self._replay()
        torch.cuda.synchronize()
        return float(self._begun.elapsed_time(self._ended)) * 1e3


def _run(schedule: Sequence[Run]) -> None:
    for run in schedule:
        run()
