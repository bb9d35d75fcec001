"""Ways of a step's regions, one for each: the least time within the room that each moment of the step leaves.

A multiple-choice knapsack whose room is limited after each region, not at the end alone: what a region's forward leaves
is there until its own backward, and in the meantime some moment needs more beside it than others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

MOST_LABELS = 20_000
"""Of combinations that are kept behind a region; where there are more, some that are nearly alike are dropped."""
PARTS = 5_000
"""Of the bytes that combinations hold: of each part, the leanest and the fastest combination are kept then."""


@dataclass(frozen=True)
class Way:
    """A way to run a region.

    Args:
        time_us: of its forward and backward.
        held_bytes: what is left behind its forward, in all of its calls that are under way at a time.
        forward_bytes: what is there while its forward runs, with what that leaves.
        backward_bytes: the same of its backward.
    """

    time_us: float
    held_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Room:
    """Bytes that a step leaves to its regions, in the order of their first forward.

    Args:
        forward: for the regions before each one, and for what is there while its forward runs.
        backward: the same of its backward.
        behind: for each one and those before it, outside of all regions; infinite where no such moment is known.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    behind: Sequence[float]


Label = tuple[int, float, tuple[int, ...]]
"""A combination of ways: bytes that it holds, its time in microseconds, and the number of each region's way."""


def fastest_ways(ways: Sequence[Sequence[Way]], room: Room) -> list[int] | None:
    """Return a way of each region, by number: the fastest that fit, None where none do.

    Of combinations that take the same time, it is the one that holds the least at the end.

    Cost:
        Of all combinations of the regions before, those are kept that no other one beats in time and bytes. Up to
        `MOST_LABELS` of them the answer is the fastest; above, it may be slower than that by what a share of
        1/`PARTS` of the bytes is worth. It always fits.
    """
    labels: list[Label] = [(0, 0.0, ())]
    for number, options in enumerate(ways):
        found = [
            (held + way.held_bytes, time_us + way.time_us, (*chosen, place))
            for held, time_us, chosen in labels
            for place, way in enumerate(options)
            if held + way.forward_bytes <= room.forward[number]
            and held + way.backward_bytes <= room.backward[number]
            and held + way.held_bytes <= room.behind[number]
        ]
        if not found:
            return None
        labels = undominated(found)
        if len(labels) > MOST_LABELS:
            labels = _thinned(labels)
    return list(min(labels, key=lambda label: (label[1], label[0]))[2])


def undominated(labels: list[Label]) -> list[Label]:
    """Return those that no other one beats, by bytes."""
    kept: list[Label] = []
    least_us = inf
    for label in sorted(labels):
        if label[1] < least_us:
            kept.append(label)
            least_us = label[1]
    return kept


def _thinned(labels: list[Label]) -> list[Label]:
    """Return of combinations, by bytes, the leanest and the fastest of each part."""
    least, most = labels[0][0], labels[-1][0]
    parts = [(label[0] - least) * PARTS // (most - least + 1) for label in labels]
    ends = [*parts[1:], PARTS]
    return [
        label
        for label, before, own, behind in zip(labels, [-1, *parts], parts, ends, strict=False)
        if own != before or own != behind
    ]
