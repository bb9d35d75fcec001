"""One training step of a configuration against plain torch, eager and compiled, on a CPU.

Policy: one process; forward, and backward with every gradient, x included; gradients dropped between steps, the same
for all; every side warmed up; turns round-robin with a rotating start; in a turn one untimed step, which finds the
caches as the others left them, then as many steps as last 20 ms, as a training loop runs them: their mean is a sample;
medians of the samples. What a step allocates is recorded before, in steps that are not timed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter_ns

import torch
from torch import nn

from autotuner.ir.models import Model
from autotuner.plan.configuration import Configuration
from autotuner.runtime.fallbacks import warn
from autotuner.runtime.peers.beside_kernels import BesideKernels
from autotuner.runtime.peers.sides import call_of, layers_of, plan_of
from autotuner.runtime.peers.training_loop import TrainingLoop, rounds

TURN_US = 20_000.0
CPU, PLAN = "cpu", "plan"


def time_on_cpu(
    configuration: Configuration,
    samples: int,
    threads: int | None,
    peers: Mapping[str, TrainingLoop] | None = None,
    settled_share: float = 0.0,
) -> tuple[dict[str, list[float]], dict[str, int], BesideKernels]:
    """Time a configuration's training step and its peers', interleaved.

    Args:
        peers: those of its model, where they are built already.
        settled_share: as for `rounds`.

    Returns:
        Times and peak of each side, and what the plan's step takes beside its kernels.
    """
    with torch_threads(threads):
        model = configuration.model
        plan = TrainingLoop(plan_of(configuration), call_of(model, CPU))
        plan.warm()
        loops = {PLAN: plan, **(peers_on_cpu(model) if peers is None else peers)}
        peaks = {name: TrainingLoop(loop.layer, call_of(model, CPU)).peak_bytes() for name, loop in loops.items()}
        times = rounds({name: partial(turn_us, loop) for name, loop in loops.items()}, samples, settled_share)
        plan.skip_kernels()
        beside = rounds({PLAN: partial(turn_us, plan)}, samples, settled_share)
        return times, peaks, BesideKernels(median(beside[PLAN]))


def peers_on_cpu(model: Model) -> dict[str, TrainingLoop]:
    """Return the peers of a model's plans, warm; a layer that cannot be compiled is missing, with a warning."""
    loops: dict[str, TrainingLoop] = {}
    for name, (compiled, make) in layers_of(model, CPU).items():
        loops[name] = TrainingLoop(make(), call_of(model, CPU))
        loops[name].warm()
        layer: nn.Module = torch.compile(make())  # type: ignore[assignment]
        loop = TrainingLoop(layer, call_of(model, CPU))
        try:
            loop.warm()
        except Exception as error:
            warn(f"{compiled} is not among the peers: {error}")
        else:
            loops[compiled] = loop
    return loops


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Have torch use so many threads, and as many as before after that; None changes nothing."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def turn_us(loop: TrainingLoop) -> float:
    """Return the mean of a turn's steps, in microseconds, the first left out."""
    step_us(loop)
    spent_us, count = 0.0, 0
    while spent_us < TURN_US:
        spent_us, count = spent_us + step_us(loop), count + 1
    return spent_us / count


def step_us(loop: TrainingLoop) -> float:
    loop.drop()
    began = perf_counter_ns()
    loop.run()
    return (perf_counter_ns() - began) / 1e3
