"""One training step of a configuration against the framework's, eager and compiled, on a CPU.

Policy: one process; forward, and backward with every gradient, x included; gradients dropped between steps, the same
for all; every side warmed up; turns round-robin with a rotating start; in a turn one untimed step, which finds the
caches as the others left them, then as many steps as last 20 ms, as a training loop runs them: their mean is a sample;
medians of the samples. What a step allocates is recorded before, in steps that are not timed.
"""

from statistics import median
from time import perf_counter_ns

import torch
from torch import nn

from autotuner.plan.configuration import Configuration, Measured
from autotuner.runtime.framework import MadeUpCall, encoder_layer
from autotuner.runtime.function import workspace_of
from autotuner.runtime.module import apply
from autotuner.runtime.peak import peak_bytes
from autotuner.runtime.tally import warn

WARM_STEPS = 5
TURN_US = 20_000.0


def time_on_cpu(configuration: Configuration, samples: int = 50, threads: int | None = None) -> Measured:
    """Time a configuration's training step and its peers', interleaved; see `time_peers`."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        model = configuration.model
        layers: dict[str, nn.Module] = {
            "plan": apply(encoder_layer(model), configuration),
            "eager": encoder_layer(model),
            "torch.compile": torch.compile(encoder_layer(model)),  # type: ignore[dict-item]
        }
        steps = {name: TrainingLoop(layer, MadeUpCall.of(model)) for name, layer in layers.items()}
        for name in tuple(steps):
            try:
                for _ in range(WARM_STEPS):
                    steps[name].sample_us()
            except Exception as error:
                if name != "torch.compile":
                    raise
                warn(f"torch.compile is not among the peers: {error}")
                del steps[name]
        peaks: dict[str, int | None] = {name: peak_bytes(layers[name], MadeUpCall.of(model)) for name in steps}
        times = rounds(steps, samples)
        overhead = steps["plan"].overhead_us(samples)
    finally:
        torch.set_num_threads(before)
    medians = {name: median(values) for name, values in times.items()}
    plan_us = medians.pop("plan")
    plan_bytes = peaks.pop("plan")
    return Measured(plan_us, overhead, medians, samples, plan_bytes, peaks)


class TrainingLoop:
    """One layer and its call."""

    def __init__(self, layer: nn.Module, call: MadeUpCall) -> None:
        self._layer, self._call = layer, call
        self._leaves = [call.x, *layer.parameters()]

    def overhead_us(self, samples: int) -> float:
        """Return the median of a tuned layer's training step with its kernels left out: staging, autograd, calls."""
        workspace = workspace_of(self._layer(self._call.x, **self._call.masks))
        workspace.skips_kernels = True
        found = median(self.turn_us() for _ in range(samples))
        workspace.skips_kernels = False
        return found

    def turn_us(self) -> float:
        """Return the mean of a turn's steps, in microseconds, the first left out."""
        self.sample_us()
        spent_us, count = 0.0, 0
        while spent_us < TURN_US:
            spent_us, count = spent_us + self.sample_us(), count + 1
        return spent_us / count

    def sample_us(self) -> float:
        """Return microseconds of one training step."""
        for leaf in self._leaves:
            leaf.grad = None
        call = self._call
        began = perf_counter_ns()
        self._layer(call.x, **call.masks).backward(call.grad_y)
        return (perf_counter_ns() - began) / 1e3


def rounds(steps: dict[str, TrainingLoop], samples: int) -> dict[str, list[float]]:
    """Sample each once per round; every round starts with the next one."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(samples):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(steps[name].turn_us())
    return times
