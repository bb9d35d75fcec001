"""Steps whose regions keep their memory from one step to the next, as those do that no graph is captured of.

Kernels are built on a workspace's memory once, and stay there. So what a region leaves for backward has a place of its
own in all moments of a step, used or not. Regions that leave nothing, whose forward backward repeats or that need no
backward, take turns with the same memory, as far as their sizes allow.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Protocol
from weakref import WeakSet

import torch

from autotuner.runtime.arena_memory import LARGER
from autotuner.runtime.step_knapsack import Label, undominated
from autotuner.runtime.step_laps import BACKWARD, HasWays, Lap, RunsSo, StepLog

MOST_LABELS = 4000
"""Of combinations that are kept behind a region; of more, the fastest few of each part of the bytes are."""
PARTS, FEW = 500, 4
Free = tuple[int, ...]
"""Sizes of memory that is there and free at some moment."""


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
        fits = (places for kept_bytes, _, places in reversed(self._front) if kept_bytes <= room)
        places = next(fits, None)
        if places is None:  # of very many combinations, the leanest may be left out
            return self._leanest if self.peak_bytes <= limit else None
        return {region: region.ways[place] for region, place in zip(self.order, places, strict=True)}

    @cached_property
    def _front(self) -> list[Label]:
        """Combinations of ways by what they keep, each faster than the one before.

        Combinations of the regions before are told apart by the memory that is free for the next one.
        """
        known: dict[Free, list[Label]] = {(): [(0, 0.0, ())]}
        for region in self.order:
            found: dict[Free, list[Label]] = defaultdict(list)
            for free, labels in known.items():
                for place, way in enumerate(region.ways):
                    more, left = self._placed(region, way, free)
                    found[left] += [(kept + more, us + way.time_us, (*places, place)) for kept, us, places in labels]
            known = _thinned({free: undominated(labels) for free, labels in found.items()})
        return undominated([label for labels in known.values() for label in labels])

    def _placed(self, region: HasWays, way: RunsSo, free: Free) -> tuple[int, Free]:
        """Return the bytes that a region adds, and the sizes of memory that is free behind its forward."""
        leaves_nothing = way.repeats or not self.held(region)
        calls = 1 if leaves_nothing else self.held(region)
        sizes, more = list(free), calls * way.copied_bytes  # which have no turns
        own_bytes = way.own_bytes - way.copied_bytes
        for _ in range(calls):
            fits = [size for size in sizes if own_bytes <= size <= LARGER * own_bytes]
            size = min(fits, default=own_bytes)
            if fits:
                sizes.remove(size)
            else:
                more += size
            if leaves_nothing:
                sizes.append(size)
        return more, tuple(sorted(sizes))

    def _kept(self, ways: Mapping[HasWays, RunsSo]) -> int:
        """Return the bytes that regions keep, if each runs so."""
        kept_bytes, free = 0, Free()
        for region in self.order:
            more, free = self._placed(region, ways[region], free)
            kept_bytes += more
        return kept_bytes


def _thinned(known: dict[Free, list[Label]]) -> dict[Free, list[Label]]:
    """Return combinations, by what is free behind them, without some where there are many."""
    every = [(label, free) for free, labels in known.items() for label in labels]
    if len(every) <= MOST_LABELS:
        return known
    sizes = [label[0] for label, _ in every]
    least, most = min(sizes), max(sizes)
    parts: dict[int, list[tuple[Label, Free]]] = defaultdict(list)
    for label, free in every:
        parts[(label[0] - least) * PARTS // (most - least + 1)].append((label, free))
    kept: dict[Free, list[Label]] = defaultdict(list)
    for part in parts.values():
        for label, free in sorted(part, key=lambda each: each[0][1])[:FEW]:
            kept[free].append(label)
    return kept


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
