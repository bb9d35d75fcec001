"""Laps of a training step: how much was allocated at most between two marks, and which regions held something then.

From one step that was measured it follows what another one will need, in which regions run in other ways, and how much
room each moment leaves to them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

from autotuner.ir.numerics import Numerics
from autotuner.runtime.step_knapsack import Room, Way, fastest_ways

FORWARD, BACKWARD, OUTSIDE = "forward", "backward", "outside of all regions"
"""Parts of a step."""


class RunsSo(Protocol):
    """A way to run a region, as `RegionWay` has it."""

    @property
    def repeats(self) -> bool: ...
    @property
    def inexact(self) -> Collection[Numerics]: ...
    @property
    def time_us(self) -> float: ...
    @property
    def own_bytes(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def gradients_bytes(self) -> int: ...
    @property
    def outside_bytes(self) -> int: ...


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
    def let_go(self) -> None: ...
    def replay(self, on: bool) -> None: ...


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


@dataclass
class StepLog:
    """Laps of one step.

    Attributes:
        laps: in order; how much was allocated is known at the end of the step.
        order: of regions, by their first forward.
        most: how many calls of a region were under way at a time.
    """

    laps: list[Lap] = field(default_factory=list)
    order: dict[HasWays, int] = field(default_factory=dict)
    most: Counter[HasWays] = field(default_factory=Counter)

    def held(self, region: HasWays) -> int:
        """Return how many calls of a region held something behind their forward: none where no backward follows."""
        behind = (lap for lap in self.laps if lap.region is not region or lap.phase == BACKWARD)
        return max((lap.under_way.get(region, 0) for lap in behind), default=0)

    def note(self, region: HasWays | None, phase: str, begun: Mapping[Any, HasWays]) -> None:
        """Note a lap that ends now; how much was allocated in it is known at the end of the step."""
        self.laps.append(Lap(0, region, phase, Counter(begun.values())))

    def count(self, peaks: Sequence[int], base_bytes: int) -> None:
        """Take the most bytes of each lap, beyond those that were there before."""
        self.laps = [replace(lap, peak_bytes=base_bytes + peak) for lap, peak in zip(self.laps, peaks, strict=True)]

    def count_what_is_kept(self) -> None:
        """Count what the next step finds in place and this one has made on its way: nothing, but see `KeptStepLog`."""

    @property
    def highest(self) -> Lap:
        """The lap in which the most was allocated."""
        return max(self.laps, key=lambda lap: lap.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.highest.peak_bytes if self.laps else 0

    def predicted_bytes(self, ways: Mapping[HasWays, RunsSo]) -> int:
        """Return the peak of such a step in which regions run so, where this one was measured with the leanest."""
        return max(lap.peak_bytes + _used(lap, ways) - _used(lap, self._leanest) for lap in self.laps)

    def fastest(self, limit: float) -> dict[HasWays, RunsSo] | None:
        """Return the fastest ways whose step takes no more than a limit at any moment, None where none do."""
        places = fastest_ways(self.options(), self.room(limit))
        if places is None:
            return None
        return {region: region.ways[place] for region, place in zip(self.order, places, strict=True)}

    def options(self) -> list[list[Way]]:
        """Return the ways of each region, in order, for the knapsack."""
        return [[_way(way, self.held(region)) for way in region.ways] for region in self.order]

    @property
    def _leanest(self) -> dict[HasWays, RunsSo]:
        return {region: region.leanest for region in self.order}

    def room(self, limit: float) -> Room:
        """Return what each moment leaves to the regions: a limit, less what was there beside them."""
        count, lean = len(self.order), self._leanest
        room: dict[str, list[float]] = {name: [inf] * count for name in (FORWARD, BACKWARD, OUTSIDE)}
        for lap in self.laps:
            left = limit - (lap.peak_bytes - _used(lap, lean))
            last = max((self.order[region] for region in lap.under_way), default=-1)
            if lap.region is None:
                if last >= 0:
                    room[OUTSIDE][last] = min(room[OUTSIDE][last], left)
                continue
            own = self.order[lap.region]
            if last < own or (last == own and lap.under_way[lap.region] == self.most[lap.region]):
                room[lap.phase][own] = min(room[lap.phase][own], left)
            else:  # it runs while a later one, or another call of its own, is under way: counted to the safe side
                left -= max(way.own_bytes for way in lap.region.ways)
                room[OUTSIDE][last] = min(room[OUTSIDE][last], left)
        return Room(room[FORWARD], room[BACKWARD], room[OUTSIDE])


def _way(way: RunsSo, calls: int) -> Way:
    """Return a way as the solver reads it; of a region with several calls under way, one of them runs."""
    rest = max(0, calls - 1) * way.held_bytes
    return Way(way.time_us, calls * way.held_bytes, rest + way.own_bytes, rest + _in_backward(way))


def _in_backward(way: RunsSo) -> int:
    """Return the bytes that a call holds while its backward runs."""
    return way.own_bytes + (way.held_bytes if way.repeats else 0)


def _used(lap: Lap, ways: Mapping[HasWays, RunsSo]) -> int:
    """Return what regions hold in a lap, if each runs so."""
    held = sum(count * ways[region].held_bytes for region, count in lap.under_way.items() if region in ways)
    if lap.region is None or lap.region not in ways:
        return held
    # At the end of its forward and in its backward, a region's own call is under way as well.
    way = ways[lap.region]
    running = _in_backward(way) if lap.phase == BACKWARD else way.own_bytes
    return held + running - (way.held_bytes if lap.region in lap.under_way else 0)
