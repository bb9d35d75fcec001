"""Steps whose regions keep their memory from one step to the next, as those do that no graph is captured of.

Kernels are built on a workspace's memory once, and stay there. So what a region leaves for backward has a place of its
own in all moments of a step, used or not. Regions that leave nothing, whose forward backward repeats or that need no
backward, take turns with the same memory, as far as their sizes allow.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, inf
from typing import Protocol
from weakref import WeakSet

import torch

from autotuner.runtime.arena_memory import LARGER
from autotuner.runtime.step_knapsack import Room, Way, fastest_ways
from autotuner.runtime.step_laps import BACKWARD, HasWays, Lap, RunsSo, StepLog

SIZES = 8
"""Of the largest memory that regions take turns with, so many are tried."""


class KeptStepLog(StepLog):
    """Laps of a step in which regions had memory of their own, all of it from the beginning."""

    def count_what_is_kept(self) -> None:
        """Count the memory of gradients in each lap, which the first backward of a region makes."""
        made: dict[HasWays, int] = {}
        laps: list[Lap] = []
        for lap in reversed(self.laps):
            laps.append(replace(lap, peak_bytes=lap.peak_bytes + sum(made.values())))
            if lap.region is not None and lap.phase == BACKWARD:
                made[lap.region] = lap.region.leanest.gradients_bytes
        self.laps = laps[::-1]

    def standing_bytes(self, ways: Mapping[HasWays, RunsSo]) -> int:
        """Return the bytes that regions keep between steps, if each runs so."""
        scratch_bytes = max((region.scratch_bytes for region in self.order), default=0)
        outside = (max(1, self.held(region)) * ways[region].outside_bytes for region in self.order)
        return scratch_bytes + self._kept(ways) + sum(outside)

    def predicted_bytes(self, ways: Mapping[HasWays, RunsSo]) -> int:
        return self.peak_bytes + self._kept(ways) - self._kept(self._leanest)

    def fastest(self, limit: float) -> dict[HasWays, RunsSo] | None:
        room = limit - (self.peak_bytes - self._kept(self._leanest))
        sizes = sorted({
            way.own_bytes for region in self.order for way in region.ways if self._leaves_nothing(region, way)
        })  # fmt: skip
        # Those that leave nothing need a place, in turn, which one that leaves something may have as well.
        most = [0, *sizes[:: ceil(len(sizes) / SIZES) or 1], *sizes[-1:]]
        tried = [self._fastest(room - beside, each) for each in most for beside in (0, each)]
        fits = [ways for ways in tried if ways is not None and self.predicted_bytes(ways) <= limit]
        return min(fits, key=_time_us, default=None)

    def _fastest(self, room: float, most_bytes: int) -> dict[HasWays, RunsSo] | None:
        """Return the fastest ways of which all that is left for backward fits into some room.

        Args:
            most_bytes: of a way that leaves nothing.
        """
        ways = {
            region: [way for way in region.ways if not self._leaves_nothing(region, way) or way.own_bytes <= most_bytes]
            for region in self.order
        }
        if not all(ways.values()):
            return None
        options = [[self._option(region, way) for way in ways[region]] for region in self.order]
        last = [*[inf] * (len(options) - 1), room][: len(options)]
        places = fastest_ways(options, Room([inf] * len(options), [inf] * len(options), last))
        if places is None:
            return None
        return {region: ways[region][place] for region, place in zip(self.order, places, strict=True)}

    def _option(self, region: HasWays, way: RunsSo) -> Way:
        kept_bytes = self._own(region, way)
        return Way(way.time_us, kept_bytes, kept_bytes, kept_bytes)

    def _own(self, region: HasWays, way: RunsSo) -> int:
        """Return what a region keeps to itself: what its calls leave that are under way at a time."""
        return 0 if self._leaves_nothing(region, way) else self.held(region) * way.own_bytes

    def _leaves_nothing(self, region: HasWays, way: RunsSo) -> bool:
        return way.repeats or not self.held(region)

    def _kept(self, ways: Mapping[HasWays, RunsSo]) -> int:
        """Return the bytes that regions keep, if each runs so."""
        free: list[int] = []
        kept_bytes = 0
        for region in self.order:
            way = ways[region]
            for _ in range(max(1, 0 if way.repeats else self.held(region))):
                fits = [size for size in free if way.own_bytes <= size <= LARGER * way.own_bytes]
                if fits:
                    free.remove(min(fits))
                else:
                    kept_bytes += way.own_bytes
                if self._leaves_nothing(region, way):
                    free.append(min(fits, default=way.own_bytes))
        return kept_bytes


class Keeper(Protocol):
    """Steps of one shape, whose regions keep memory."""

    @property
    def device(self) -> torch.device: ...
    @property
    def standing_bytes(self) -> int:
        """The bytes that are kept now; 0 while a step is under way."""

    def give_up(self) -> None:
        """Let what is kept go, between two steps."""


_KEEPERS: "WeakSet[Keeper]" = WeakSet()


def make_room(keeper: Keeper, room_bytes: float) -> None:
    """Have others on a device give up what they keep, the largest first, until no more than some bytes are kept."""
    others = [each for each in _KEEPERS if each is not keeper and each.device == keeper.device and each.standing_bytes]
    kept_bytes = sum(each.standing_bytes for each in others)
    for other in sorted(others, key=lambda each: each.standing_bytes, reverse=True):
        if kept_bytes > room_bytes:
            kept_bytes -= other.standing_bytes
            other.give_up()
    _KEEPERS.add(keeper)


def _time_us(ways: Mapping[HasWays, RunsSo]) -> float:
    return sum(way.time_us for way in ways.values())
