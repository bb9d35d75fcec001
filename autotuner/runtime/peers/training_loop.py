"""A layer that is stepped as a training loop steps it, what a step allocates, and turns of several such loops."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import nn

from autotuner.measure.devices import device_of
from autotuner.measure.race import interval
from autotuner.runtime.arena_memory import apart
from autotuner.runtime.model_module import ModelModule
from autotuner.runtime.module import TunedModule
from autotuner.runtime.peers.sides import StepCall

TUNED = (TunedModule, ModelModule)
WARM_STEPS = 5
RECORDED_STEPS = 2
FAR_SHARE = 1 / 32
ROUNDS_MIN = 8
"""Fewer give no interval of a median that says much."""


class TrainingLoop:
    """A layer with its call. Each step drops all gradients first, so that it makes new ones."""

    def __init__(self, layer: nn.Module, call: StepCall) -> None:
        self.layer, self._call = layer, call
        self.leaves = [*call.leaves, *layer.parameters()]

    @property
    def device(self) -> torch.device:
        return self._call.device

    def drop(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def run(self) -> None:
        """Run forward, and backward with every gradient."""
        self._call.step(self.layer)

    def step(self) -> None:
        self.drop()
        self.run()

    def warm(self) -> None:
        for _ in range(WARM_STEPS):
            self.step()

    def renew(self) -> None:
        """Have a tuned layer give up its memory."""
        if isinstance(self.layer, TUNED):
            self.layer.renew()

    def skip_kernels(self) -> None:
        """Have a tuned layer leave out its kernels from now on: what is left is copies, autograd and Python."""
        self._call.forward(self.layer)
        assert isinstance(self.layer, TUNED)
        self.layer.skip_kernels()

    def peak_bytes(self) -> int:
        """Return the most bytes that a step has allocated at any time; see the function of this name."""

        def steps() -> None:
            with apart():
                for _ in range(RECORDED_STEPS):
                    self.step()

        self.step()  # what is compiled is compiled here
        self.renew()
        self.drop()
        device = self.device
        found = device_of(device.type, device.index or 0).allocated_bytes(steps)
        self.drop()
        return found


def peak_bytes(layer: nn.Module, call: StepCall) -> int:
    """Return the most bytes that a training step has allocated at any time beside parameters and inputs.

    Forward, and backward with every gradient; gradients of the step before are dropped first. It is the second step
    that counts where steps differ: a tuned layer allocates its arena in the first, and what it hands out stays
    allocated for the next.

    Args:
        layer: a tuned one or the framework's, compiled or not. A tuned one is given new memory.
        call: what it is called with. Memory that only graphs use counts while they are captured.
    """
    return TrainingLoop(layer, call).peak_bytes()


def rounds(
    turns: Mapping[str, Callable[[], float]], samples: int, settled_share: float = 0.0
) -> dict[str, list[float]]:
    """Take a turn of each once per round, in orders in which each comes as often behind any other, over all of them.

    What has run before changes a turn: behind a step that leaves the device half idle, it is cooler, and its clock is
    higher.

    Args:
        samples: rounds, at most.
        settled_share: no more rounds once each median is known so well, by half of its 95 % interval over it. One that
            is far from the least may be known less well: within `FAR_SHARE` of what lies between.
    """
    names = list(turns)
    orders = balanced_orders(len(names))
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(samples):
        for place in orders[number % len(orders)]:
            times[names[place]].append(turns[names[place]]())
        least = min(map(median, times.values()))
        if number + 1 >= ROUNDS_MIN and all(is_settled(found, settled_share, least) for found in times.values()):
            break
    return times


def is_settled(samples: Sequence[float], share: float, least: float) -> bool:
    """Say whether a median is known well enough, as `rounds` says; never for a share of 0.

    Args:
        least: of all medians.
    """
    low, high = interval(samples)
    found = median(samples)
    return share > 0 and (high - low) / 2 <= max(share * found, FAR_SHARE * (found - least))


def balanced_orders(count: int) -> list[list[int]]:
    """Return orders of so many sides in which each comes directly behind each other one equally often.

    >>> balanced_orders(4)
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]

    Source:
        Williams: Experimental designs balanced for the estimation of residual effects of treatments (1949).
    """
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    orders = [[(shift + step) % count for step in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]
