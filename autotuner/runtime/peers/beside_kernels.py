"""The time of a captured step that is not in the timings of its kernels: what is copied, switched and slowed down.

Each kernel is timed alone: call behind call of the same kernel, in short rounds. In a step, another kernel runs before
it, and load that lasts may lower the device's clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import sleep
from typing import Protocol

import torch
from torch.nn import functional

from autotuner.runtime.devices import DeviceRuntime, Run

EXTENT = 256
"""Of the matrices of small kernels: they stay in the second-level cache, and a kernel lasts a few microseconds."""
REPEATS = 16
TURNS = 15
PAUSE_S = 0.3
"""Behind load that lasted: until then, a device that had lowered its clock has raised it again."""
BRIEFS = 7


@dataclass(frozen=True)
class BesideKernels:
    """The fields of these names of `autotuner.plan.parts.Measured`."""

    overhead_us: float
    switching_us: float = 0.0
    slowdown: float = 1.0


class TakesTurns(Protocol):
    """A side that is timed in short rounds."""

    def brief_us(self) -> float: ...


def slowdown(lasting_us: float, side: TakesTurns) -> float:
    """Return a step's time under load that lasts over that in short rounds, each behind a pause."""
    briefs = []
    for _ in range(BRIEFS):
        sleep(PAUSE_S)
        briefs.append(side.brief_us())
    return lasting_us / median(briefs)


def switching_us(runtime: DeviceRuntime) -> float:
    """Return what a small kernel takes longer behind another one than behind itself, in microseconds.

    Some kernels of torch take turns in one graph; each also has a graph of its own with as many calls.
    """
    runs = _small_kernels(runtime.device)
    for run in runs:
        run()
    pool = runtime.pool()
    mixed = runtime.captured(partial(_run, runs * REPEATS), pool)
    alone = [runtime.captured(partial(_run, [run] * (REPEATS * len(runs))), pool) for run in runs]
    found = []
    for _ in range(TURNS):
        of_alone = [_replay_us(runtime, replay) for replay in alone]
        found.append(_replay_us(runtime, mixed) - sum(of_alone) / len(of_alone))
    return max(0.0, median(found) / (REPEATS * len(runs)))


def _small_kernels(device: torch.device) -> list[Run]:
    x, y, made = (torch.randn(EXTENT, EXTENT, device=device, dtype=torch.bfloat16) for _ in range(3))
    wide = torch.randn(EXTENT, 4 * EXTENT, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(wide)
    mean = torch.empty(EXTENT, device=device, dtype=torch.bfloat16)
    functions: Sequence[Callable[[], object]] = (
        partial(torch.mm, x, y, out=made),
        partial(torch.add, x, y, out=made),
        partial(torch.mm, x, wide, out=product),
        partial(torch.softmax, x, 1, out=made),
        partial(torch.sum, x, 0, out=mean),
        partial(functional.gelu, x),
        partial(torch.mm, product, wide.t(), out=made),
        partial(torch.tanh, x, out=made),
    )
    return list(functions)


def _run(runs: Sequence[Run]) -> None:
    for run in runs:
        run()


def _replay_us(runtime: DeviceRuntime, replay: Run) -> float:
    replay()
    began = runtime.mark()
    replay()
    return runtime.elapsed_us(began, runtime.mark())
