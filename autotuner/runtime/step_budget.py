"""Budget of a whole training step: each region's way of running, found in the first steps by what these need.

The first step compiles, and makes the optimizer's state; each region runs the leanest way it has. The second one does
so again, and at each beginning and end of a region's forward and backward it is noted how much was allocated at most
since the last one. What a step needs beside its regions is measured like this, moment by moment, and nothing of it is
guessed. Then the fastest ways are taken that leave room for it at each moment, and a third step is measured in which
they run. Where that needs more than it should, faster ways are given up, and the next step is measured.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from autotuner.errors import BudgetError
from autotuner.plan.phrases import binary
from autotuner.runtime.devices import DeviceRuntime
from autotuner.runtime.fallbacks import warn
from autotuner.runtime.scratch import Scratch, sharing
from autotuner.runtime.step_knapsack import Room, Way, fastest_ways

TRIES = 4
"""Choices that are measured before each region runs the leanest way that it has."""
MARGIN = 1 / 256
"""Of the budget, which is given up beyond what a measured step was above it."""
FORWARD, BACKWARD, OUTSIDE = "forward", "backward", "outside of all regions"
"""Parts of a step."""


class RunsSo(Protocol):
    """A way to run a region, as `RegionWay` has it."""

    @property
    def repeats(self) -> bool: ...
    @property
    def time_us(self) -> float: ...
    @property
    def own_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...


class HasWays(Protocol):
    """A region with several ways, as `RegionChoice` has them."""

    label: str
    draws: bool
    scratch_bytes: int

    @property
    def ways(self) -> Sequence[RunsSo]: ...
    @property
    def fastest(self) -> RunsSo: ...
    @property
    def leanest(self) -> RunsSo: ...


class _Stage(Enum):
    FIRST = "compiles"
    LEAN = "is measured, all regions as lean as they can"
    CHOSEN = "is measured, all regions as chosen"
    SETTLED = "is as it stays"


class _Current(threading.local):
    budget: "StepBudget | None" = None


_CURRENT = _Current()


def current_budget() -> "StepBudget | None":
    """Return the budget of the training step that this thread runs, None for none."""
    return _CURRENT.budget


@dataclass(frozen=True)
class Lap:
    """The time between two marks of a step.

    Args:
        peak_bytes: the most that was allocated in it.
        region: whose forward or backward it is; None outside of all.
        phase: "forward" or "backward", or `OUTSIDE`.
        under_way: regions whose forward has run and whose backward has not, with how often.
    """

    peak_bytes: int
    region: HasWays | None
    phase: str
    under_way: Mapping[HasWays, int]


@dataclass(frozen=True)
class StepNeeds:
    """Needs of a training step, in bytes of the device's memory, its parameters and the optimizer's state among them.

    Args:
        budget_bytes: what it may need.
        least_bytes: what it needs with each region as lean as it can be.
        predicted_bytes, measured_bytes: at its peak, as it runs now; `measured_bytes` is 0 before it did.
        reserved_bytes: the most that the allocator has taken from the device; 0 where it keeps nothing that is freed.
        regions, repeating: how many regions there are, and how many of them run their forward again in backward.
        least_us, time_us: what all regions take at their fastest, and as they run now.
    """

    budget_bytes: int
    least_bytes: int
    predicted_bytes: int
    measured_bytes: int
    reserved_bytes: int
    regions: int
    repeating: int
    least_us: float
    time_us: float

    def __str__(self) -> str:
        slower = f", {self.time_us / self.least_us - 1:+.1%} of their time" if self.least_us else ""
        most = max(self.measured_bytes, self.reserved_bytes)
        told = f"{binary(most)} measured" if most else f"{binary(self.predicted_bytes)} predicted"
        return (
            f"a step needs {told}, of a budget of {binary(self.budget_bytes)}; {self.repeating} of {self.regions} "
            f"regions run their forward again in backward{slower}"
        )


@dataclass
class StaticBytes:
    """Bytes of what is there between steps, and of gradients at the end of backward."""

    parameters: int
    gradients: int
    state: int

    @property
    def kept(self) -> int:
        return self.parameters + self.state


@dataclass
class _Log:
    """Marks of one step."""

    laps: list[Lap] = field(default_factory=list)
    order: dict[HasWays, int] = field(default_factory=dict)
    most: Counter[HasWays] = field(default_factory=Counter)
    repeats: int = 0

    def held(self, region: HasWays) -> int:
        """Return how many calls of a region held something behind their forward: none where no backward follows."""
        behind = (lap for lap in self.laps if lap.region is not region or lap.phase == BACKWARD)
        return max((lap.under_way.get(region, 0) for lap in behind), default=0)

    def note(self, region: HasWays | None, phase: str, begun: Mapping[Any, HasWays]) -> None:
        """Note a lap that ends now; how much was allocated in it is known at the end of the step."""
        self.laps.append(Lap(0, region, phase, Counter(begun.values())))


class StepBudget:
    """Ways of the regions in training steps of one shape, under a budget.

    Attributes:
        budget_bytes: that a step may need, everything in it.
        is_settled: whether the ways stay as they are.
        needs: what a step needs, once that is known.
    """

    def __init__(self, budget_bytes: int, runtime: DeviceRuntime, static: Callable[[], StaticBytes]) -> None:
        """Decide nothing yet.

        Args:
            budget_bytes: for the peak of the device's memory.
            runtime: of the device.
            static: says what is there between steps.
        """
        self.budget_bytes = budget_bytes
        self._runtime, self._static = runtime, static
        self._stage = _Stage.FIRST
        self._limit = float(budget_bytes)
        self._ways: dict[HasWays, RunsSo] = {}
        self._log: _Log | None = None
        self._meter: Any = None
        self._lean: tuple[_Log, int] | None = None
        self._begun: WeakKeyDictionary[Any, HasWays] = WeakKeyDictionary()
        self._scratch_bytes = self._base_bytes = 0
        self._repeats = 0
        self._tries = 0
        self.needs: StepNeeds | None = None

    @property
    def is_settled(self) -> bool:
        return self._stage is _Stage.SETTLED

    @property
    def repeats(self) -> int:
        """Number of times that a step draws the same numbers twice."""
        return self._repeats

    def way_of(self, region: HasWays) -> RunsSo:
        """Return the way that a region runs in the step that is under way."""
        return self._ways.get(region, region.leanest)

    @contextmanager
    def step(self, *, captured: bool = False) -> Iterator[None]:
        """Run a step's forward, backward and update inside; behind it, the ways of the next one are known.

        Args:
            captured: whether it is captured, and decides nothing.

        Raises:
            BudgetError: no way of each region leaves enough room.
        """
        measured = self._stage in (_Stage.LEAN, _Stage.CHOSEN) and not captured
        self._meter = self._runtime.meter() if measured else None
        before, _CURRENT.budget = _CURRENT.budget, self
        self._log, self._repeats = _Log(), 0
        scratch = Scratch(is_of_one_step=not captured)
        peak_bytes = reserved_bytes = 0
        try:
            with sharing(scratch):
                if self._scratch_bytes:
                    scratch.memory(self._scratch_bytes, self._runtime.device)
                yield
        finally:
            _CURRENT.budget = before
            log, self._log = self._log, None
            if self._meter is not None:
                log.note(None, OUTSIDE, self._begun)
                base = 0 if self._meter.counts_all else self._base_bytes
                peaks, reserved_bytes = self._meter.stop()
                log.laps = [replace(lap, peak_bytes=base + peak) for lap, peak in zip(log.laps, peaks, strict=True)]
                peak_bytes, self._meter = base + max(peaks), None
            self._begun.clear()
        if not captured:
            self._go_on(log, peak_bytes, reserved_bytes)

    @contextmanager
    def inside(self, region: HasWays, phase: str) -> Iterator[None]:
        """Run a region's forward or backward inside."""
        log = self._log
        if log is None:
            yield
            return
        log.order.setdefault(region, len(log.order))
        if self._meter is not None:
            log.note(None, OUTSIDE, self._begun)
            self._meter.lap()
        yield
        if self._meter is not None:
            log.note(region, phase, self._begun)
            self._meter.lap()

    def began(self, held: Any, region: HasWays) -> None:
        """Note that a forward has run, and holds something for its backward."""
        self._begun[held] = region
        if self._log is not None:
            self._log.most[region] = max(self._log.most[region], sum(each is region for each in self._begun.values()))
            self._log.repeats += region.draws and self.way_of(region).repeats
            self._repeats = self._log.repeats

    def ended(self, held: Any) -> None:
        """Note that its backward has run."""
        self._begun.pop(held, None)

    def exceeded(self, reserved_bytes: int) -> bool:
        """Take what a captured step has reserved; where that is too much, choose again, and say that it was."""
        assert self.needs is not None
        self._told(self.needs.predicted_bytes, self.needs.measured_bytes, reserved_bytes)
        return self._is_tightened(reserved_bytes)

    def _go_on(self, log: _Log, peak_bytes: int, reserved_bytes: int) -> None:
        self._scratch_bytes = max([self._scratch_bytes, *(region.scratch_bytes for region in log.order)])
        self._base_bytes = self._static().kept
        if self._stage is _Stage.FIRST:
            self._stage = _Stage.LEAN
        elif self._stage is _Stage.LEAN:
            self._lean = log, peak_bytes
            # What the allocator holds beside what it has given out is no room.
            self._limit = float(self.budget_bytes - max(0, reserved_bytes - peak_bytes))
            self._choose()
        elif self._stage is _Stage.CHOSEN:
            assert self.needs is not None
            self._told(self.needs.predicted_bytes, peak_bytes, reserved_bytes)
            if not self._is_tightened(max(peak_bytes, reserved_bytes)):
                self._stage = _Stage.SETTLED

    def _is_tightened(self, most_bytes: int) -> bool:
        """Choose again, with as much less room as a step was above the budget; say whether it was above and that helps.

        After some tries, each region runs the leanest way that it has. Where that is above the budget too, it stays so,
        and a warning says it.
        """
        assert self.needs is not None
        if most_bytes <= self.budget_bytes:
            return False
        if not self._ways:
            warn(
                f"a training step needs {binary(most_bytes)}, and memory_budget is {binary(self.budget_bytes)}: each "
                "region runs as lean as it can; give it more memory, or a smaller batch"
            )
            return False
        self._limit -= most_bytes - self.budget_bytes + MARGIN * self.budget_bytes
        try:
            if self._tries >= TRIES:
                raise BudgetError("it was tried often enough", most_bytes)
            self._choose()
        except BudgetError:
            self._ways = {}
            self._told(self.needs.least_bytes, 0, 0)
            self._stage = _Stage.CHOSEN
        return True

    def _choose(self) -> None:
        """Take the fastest ways that leave enough room."""
        assert self._lean is not None
        log, peak_bytes = self._lean
        regions = list(log.order)
        if not regions:
            warn(
                f"memory_budget decides nothing: no region of this model runs tuned, and a step needs "
                f"{binary(peak_bytes)}; autotuner.summary(model) says why"
            )
        options = [[_way(way, log.held(region)) for way in region.ways] for region in regions]
        room, lean = self._room(log, regions), {region: region.leanest for region in regions}
        if peak_bytes > self._limit:
            beside = self.budget_bytes - int(self._limit)
            raise BudgetError(self._too_small(log, peak_bytes), peak_bytes + max(0, beside))
        try:
            places = fastest_ways(options, room)
        except BudgetError:  # by the room of moments that were counted to the safe side
            places = [region.ways.index(region.leanest) for region in regions]
        self._ways = {region: region.ways[place] for region, place in zip(regions, places, strict=True)}
        self._tries += 1
        predicted = max(
            lap.peak_bytes + _used(lap, self._ways) - _used(lap, lean) for lap in log.laps
        )  # fmt: skip
        self._told(predicted, 0, 0)
        self._stage = _Stage.CHOSEN

    def _room(self, log: _Log, regions: Sequence[HasWays]) -> Room:
        """Return what each moment leaves to the regions: the budget, less what was there beside them."""
        count = len(regions)
        room: dict[str, list[float]] = {name: [inf] * count for name in (FORWARD, BACKWARD, OUTSIDE)}
        lean = {region: region.leanest for region in regions}
        for lap in log.laps:
            left = self._limit - (lap.peak_bytes - _used(lap, lean))
            last = max((log.order[region] for region in lap.under_way), default=-1)
            if lap.region is None:
                if last >= 0:
                    room[OUTSIDE][last] = min(room[OUTSIDE][last], left)
                continue
            own = log.order[lap.region]
            if last < own or (last == own and lap.under_way[lap.region] == log.most[lap.region]):
                room[lap.phase][own] = min(room[lap.phase][own], left)
            else:  # it runs while a later one is under way
                left -= max(way.own_bytes for way in lap.region.ways)
                room[OUTSIDE][last] = min(room[OUTSIDE][last], left)
        return Room(room[FORWARD], room[BACKWARD], room[OUTSIDE])

    def _told(self, predicted_bytes: int, measured_bytes: int, reserved_bytes: int) -> None:
        assert self._lean is not None
        log, least_bytes = self._lean
        ways = [self.way_of(region) for region in log.order]
        self.needs = StepNeeds(
            self.budget_bytes, least_bytes, predicted_bytes, measured_bytes, reserved_bytes, len(ways),
            sum(way.repeats for way in ways), sum(region.fastest.time_us for region in log.order),
            sum(way.time_us for way in ways),
        )  # fmt: skip

    def _too_small(self, log: _Log, peak_bytes: int) -> str:
        static, lap = self._static(), max(log.laps, key=lambda lap: lap.peak_bytes)
        rest = max(0, peak_bytes - static.kept - static.gradients)
        beside = max(0, self.budget_bytes - int(self._limit))
        kept = f", {binary(beside)} that the allocator holds beside" if beside else ""
        where = lap.phase if lap.region is None else f"in the {lap.phase} of {lap.region.label}"
        return (
            f"memory_budget is {binary(self.budget_bytes)}, and a training step needs {binary(peak_bytes + beside)} at "
            f"least, with the forward of all {len(log.order)} tuned regions repeated in backward: "
            f"{binary(static.parameters)} of parameters and buffers, {binary(static.state)} of the optimizer's state, "
            f"{binary(static.gradients)} of gradients, {binary(rest)} of all else{kept}. It needs most {where}: give "
            "it more memory, or a smaller batch"
        )


def _way(way: RunsSo, calls: int) -> Way:
    """Return a way as the solver reads it; of a region with several calls under way, one of them runs."""
    rest = max(0, calls - 1) * way.held_bytes
    return Way(way.time_us, calls * way.held_bytes, rest + way.own_bytes, rest + way.own_bytes)


def _used(lap: Lap, ways: Mapping[HasWays, RunsSo]) -> int:
    """Return what regions hold in a lap, if each runs so."""
    held = sum(count * ways[region].held_bytes for region, count in lap.under_way.items() if region in ways)
    if lap.region is None or lap.region not in ways:
        return held
    # At the end of its forward and in its backward, a region's own call is under way as well.
    way = ways[lap.region]
    own = way.own_bytes - (way.held_bytes if lap.region in lap.under_way else 0)
    return held + own
