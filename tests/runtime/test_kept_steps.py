"""Steps whose regions keep memory: the ways that are taken, against all that there are."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from autotuner.runtime.devices import device_runtime
from autotuner.runtime.kept_steps import KeptStepLog
from autotuner.runtime.model_memory import StaticBytes
from autotuner.runtime.step_budget import StepBudget
from autotuner.runtime.step_laps import BACKWARD, FORWARD, OUTSIDE, Lap

REGIONS = 5


@dataclass(frozen=True, eq=False)
class MadeUpWay:
    time_us: float
    own_bytes: int
    repeats: bool
    gradients_bytes: int = 7
    outside_bytes: int = 11
    copied_bytes: int = 0
    inexact: tuple[()] = ()

    @property
    def held_bytes(self) -> int:
        return 0 if self.repeats else self.own_bytes


class MadeUpRegion:
    """A region with two plans, each of which may repeat its forward."""

    label, draws, scratch_bytes = "made up", False, 100

    def __init__(self, random: Random) -> None:
        plans = [(random.uniform(100, 200), random.randint(500, 2000)) for _ in range(2)]
        self.ways = [
            MadeUpWay(us * (1 + 0.4 * repeats), size, repeats, copied_bytes=size // 5 * copies)
            for (us, size), copies in zip(plans, (0, 1), strict=True)
            for repeats in (False, True)
        ]
        self.fastest = min(self.ways, key=lambda way: way.time_us)
        self.leanest = min(self.ways, key=lambda way: (way.held_bytes, way.own_bytes, way.time_us))

        self.replayed: list[bool] = []
        self._on = False

    def let_go(self) -> None:
        pass

    def replay(self, on: bool) -> None:
        self._on = on

    def run(self, budget: StepBudget) -> None:
        """Run a training step of this region alone."""
        with budget.step():
            self.replayed.append(self._on)
            with budget.inside(self, FORWARD):
                held = Held()
            budget.began(held, self)
            with budget.inside(self, BACKWARD):
                budget.ended(held)


class Held:
    """What a forward holds for its backward."""


def log_of(seed: int, calls: int = 1) -> KeptStepLog:
    """Return the log of a step that was measured with regions as lean as they can be, at its fullest behind forward."""
    random = Random(seed)
    regions: list[Any] = [MadeUpRegion(random) for _ in range(REGIONS)]
    log = KeptStepLog()
    log.order = {region: number for number, region in enumerate(regions)}
    log.laps = [Lap(10_000, None, OUTSIDE, Counter(dict.fromkeys(regions, calls)))]
    return log


def time_us(ways: dict[Any, Any]) -> Any:
    return sum(way.time_us for way in ways.values())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("calls", [1, 2])
def test_the_ways_that_are_taken_fit_and_are_the_fastest_that_do(seed: int, calls: int) -> None:
    log = log_of(seed, calls)
    every = [dict(zip(log.order, ways, strict=True)) for ways in product(*(region.ways for region in log.order))]
    least = log.peak_bytes
    most = log.predicted_bytes({region: region.fastest for region in log.order})
    assert least < most
    for share in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0):
        limit = least + share * (most - least)
        found = log.fastest(limit)
        assert found is not None
        assert log.predicted_bytes(found) <= limit
        best = min(time_us(ways) for ways in every if log.predicted_bytes(ways) <= limit)
        assert time_us(found) == pytest.approx(best)
    assert log.fastest(min(log.predicted_bytes(ways) for ways in every) - 1) is None


def test_gradients_that_a_step_makes_on_its_way_count_in_all_moments_before() -> None:
    log = log_of(0)
    first, second = list(log.order)[:2]
    nothing: Counter[Any] = Counter()
    log.laps = [
        Lap(50, None, OUTSIDE, nothing), Lap(60, second, BACKWARD, nothing), Lap(65, first, BACKWARD, nothing),
        Lap(55, None, OUTSIDE, nothing),
    ]  # fmt: skip
    log.count_what_is_kept()
    assert [lap.peak_bytes for lap in log.laps] == [50 + 2 * 7, 60 + 7, 65, 55]


def test_regions_that_leave_nothing_take_turns_with_memory_of_a_size_that_fits() -> None:
    log = log_of(3)
    small, large = 600, 1300  # more than twice as large: no other memory for it
    ways: dict[Any, Any] = {
        region: MadeUpWay(1.0, size, repeats=True)
        for region, size in zip(log.order, (large, small, large, small, 640), strict=True)
    }
    assert log.standing_bytes(ways) == 100 + large + small + 640 + REGIONS * 11
    ways[list(log.order)[4]] = MadeUpWay(1.0, large, repeats=False)  # has the first one's place until its backward
    assert log.standing_bytes(ways) == 100 + large + small + REGIONS * 11
    ways[next(iter(log.order))] = MadeUpWay(1.0, large + 60, repeats=True, copied_bytes=60)
    assert log.standing_bytes(ways) == 100 + large + small + REGIONS * 11 + 60


def test_calls_become_graphs_behind_the_step_that_builds_on_memory_that_stays_also_once_it_was_given_up() -> None:
    def budget() -> StepBudget:
        return StepBudget(1 << 30, device_runtime(torch.device("cpu")), lambda: StaticBytes(0, 0, 0), keeps=True)

    own, other = (budget(), MadeUpRegion(Random(0))), (budget(), MadeUpRegion(Random(1)))
    for _ in range(5):
        own[1].run(own[0])
    assert own[1].replayed == [False, False, False, True, True]
    assert not own[1]._on  # outside of steps
    other[1].run(other[0])  # needs all memory, since it is not known how much
    own[1].replayed.clear()
    for _ in range(3):
        own[1].run(own[0])
    assert own[1].replayed == [False, True, True]
