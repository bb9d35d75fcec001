"""Choice of a configuration's overlap on a device with graphs: whole plans in one process, measured in turn.

Policy: forward and backward of a plan are one graph. All variants run over the same memory, in which nothing is shared,
with made-up parameters and inputs. Two variants take turns in random order. A turn is one untimed replay, then replays
that last 4 ms or more between two events. The difference of a pair of turns is a sample of the gain.
"""

import random
from functools import partial
from math import ceil
from statistics import median

import torch

from autotuner.errors import first_line
from autotuner.ir.device import has_graphs
from autotuner.measure.race import interval
from autotuner.plan.configuration import Configuration
from autotuner.plan.memory_planner import Schedule
from autotuner.plan.overlap import chosen_overlap, exceeds_budget, proposed_branches, with_overlap
from autotuner.plan.parts import Overlap
from autotuner.plan.step import Branches
from autotuner.runtime.branching import BranchingCalls
from autotuner.runtime.devices import Run, device_runtime
from autotuner.runtime.fallbacks import warn
from autotuner.runtime.training_step import TrainingStep

TURN_US = 4_000.0
PAIRS = 21
WEIGHT_DEVIATION = 0.02


def with_measured_overlap(configuration: Configuration) -> Configuration:
    """Return a configuration with the branches that make its training step faster on this device, if any do.

    One that has an overlap is returned as it is; so is one whose branches cannot be measured, with a warning, or need
    more than the memory budget.
    """
    device_type = configuration.environment["device_type"]
    proposed = proposed_branches(configuration)
    if not has_graphs(str(device_type)) or not proposed or configuration.overlap is not None:
        return configuration
    try:
        overlap = chosen_overlap(proposed, PlanVariants(configuration).compared)
    except Exception as error:
        warn(f"overlap of kernel steps could not be measured, and none was chosen: {first_line(error)}")
        return configuration
    changed = with_overlap(configuration, overlap)
    return configuration if exceeds_budget(changed) else changed


class PlanVariants:
    """A configuration's steps, built once, as one graph for each choice of branches."""

    def __init__(self, configuration: Configuration) -> None:
        self._runtime = device_runtime(torch.device(str(configuration.environment["device_type"])))
        device = self._runtime.device
        graph = configuration.graph()
        generator = torch.Generator(device).manual_seed(0)
        parameters = {
            name: WEIGHT_DEVIATION * torch.randn(graph.shape(name), generator=generator, device=device)
            for name, tensor in graph.tensors.items()
            if tensor.role == "parameter"
        }
        self._step = TrainingStep(configuration, parameters, graphs=False, shares=False)
        workspace = self._step.workspace
        for stage in workspace.stages():
            stage.normal_(generator=generator)
        self._calls = [workspace.calls(phase) for phase in ("forward", "backward")]
        self._schedule = self._step.plan.schedule
        self._pool = self._runtime.pool()
        self._replays: dict[Branches, Run] = {}
        self._run(())
        self._runtime.synchronize()

    def runs(self) -> list[Run]:
        """Return the call of each step, in order."""
        merged = {**self._calls[0], **self._calls[1]}
        return [merged[number] for number in sorted(merged)]

    def compared(self, before: Branches, after: Branches) -> Overlap:
        """Measure some branches against others."""
        sides = [self._replay(branches) for branches in (before, after)]
        count = max(1, ceil(TURN_US / self._turn_us(sides[0], 1)))
        draw = random.Random(0)
        gains = []
        for _ in range(PAIRS):
            found = [0.0, 0.0]
            for place in draw.sample((0, 1), 2):
                found[place] = self._turn_us(sides[place], count)
            gains.append(found[0] - found[1])
        return Overlap(after, median(gains), *interval(gains))

    def _replay(self, branches: Branches) -> Run:
        if branches not in self._replays:
            self._replays[branches] = self._runtime.captured(partial(self._run, branches), self._pool)
        return self._replays[branches]

    def _run(self, branches: Branches) -> None:
        schedule = Schedule(self._schedule.sources, self._schedule.forward, branches)
        for calls in self._calls:
            BranchingCalls(calls, schedule, self._runtime).run()

    def _turn_us(self, replay: Run, count: int) -> float:
        """Return microseconds of a replay, the mean of so many behind one that is not timed."""
        replay()
        began = self._runtime.mark()
        for _ in range(count):
            replay()
        return self._runtime.elapsed_us(began, self._runtime.mark()) / count
