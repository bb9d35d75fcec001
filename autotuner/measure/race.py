"""Races between candidates: turns, elimination and the stop rule. Samples are fed in, and no clock is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import takewhile
from math import comb, inf
from statistics import median

LOOK_FACTOR = 2.0
FIRST_FACTOR = 1.5
LATER_FACTOR = 1.2
AGREE_FACTOR = 1.25
LOOKS_MAX = 4
FEW_SAMPLES = 3
SETTLED_SHARE = 0.01
SETTLED_US = 0.5
COVERAGE = 0.95


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest symmetric pair of order statistics that covers the median in at least 95 % of cases.

    Below 6 samples no pair does: the extremes are returned, which cover 94 % of cases at 5 samples and 75 % at 3.
    """
    ordered, count = sorted(samples), len(samples)
    depths = takewhile(lambda depth: coverage(count, depth) >= COVERAGE, range((count + 1) // 2))
    depth = max(depths, default=0)
    return ordered[depth], ordered[count - 1 - depth]


def coverage(count: int, depth: int) -> float:
    """Return how often the median lies between the samples that are `depth` from either end, of `count` samples."""
    return 1 - 2 * sum(comb(count, below) for below in range(depth + 1)) / float(2**count)


@dataclass
class Runner:
    """One candidate in a race: what it has shown so far, in microseconds."""

    looks_us: list[float] = field(default_factory=list)
    samples_us: list[float] = field(default_factory=list)
    out: bool = False
    failed: bool = False
    doubtful: bool = False
    """True if it would be out by a look or sample that nothing agrees with: it is looked at again first."""
    shown_us: float = inf
    """The time that it is judged by: its median; the least of looks and samples where a single one decides it."""

    @property
    def kept_us(self) -> list[float]:
        """The samples that count: looks only where there are too few others for a median that one cannot spoil."""
        return self.samples_us if len(self.samples_us) >= FEW_SAMPLES else [*self.looks_us, *self.samples_us]

    @property
    def time_us(self) -> float:
        """Time of a call, by what it has shown."""
        return median(self.samples_us) if len(self.samples_us) >= FEW_SAMPLES else min(self.kept_us)

    @property
    def rests_on_one(self) -> bool:
        """True while nothing yet agrees with the least that it has shown."""
        ordered = sorted([*self.looks_us, *self.samples_us])
        return len(ordered) < 2 or ordered[1] > AGREE_FACTOR * ordered[0]


class Race:
    """Candidates that compete.

    Everyone gets one look, in the order given; then rounds over those that are left, each round starting one place
    further. After every sample, candidates above a factor times the incumbent (the least time shown) are out: 2 on
    looks alone, 1.5 with one kept sample, 1.2 with more. A single look or sample ends nobody: whoever would be out
    is looked at again, after another candidate was where there is one, until the two least of what it has shown
    agree within 25 % or it was looked at four times. Up to three kept samples, the least of what a candidate has
    shown counts; from then on the median, which one bad sample does not move. The looks may leave one candidate;
    the later rules leave two. Who is out comes back when the incumbent turns out slower, so that a lucky sample of
    one candidate ends no other, and nobody who is out shows a lower time than the winner. A candidate is settled,
    and gets no further samples, when the 95 % interval of its median is narrower than max(1 %, 0.5 us) or it has
    `samples_max` samples. The race is over when all are out, failed or settled, or when the rounds have taken
    `limit_us`.
    """

    def __init__(self, count: int, *, samples_min: int, samples_max: int, limit_us: float) -> None:
        self.runners = [Runner() for _ in range(count)]
        self._samples_min, self._samples_max, self._limit_us = samples_min, samples_max, limit_us
        self._round = 0
        self._turns: list[int] = []
        self._spent_us = 0.0
        self._last = -1

    def next(self) -> int | None:
        """Return whose turn it is, or None when the race is over."""
        again = [index for index, runner in enumerate(self.runners) if runner.doubtful]
        if again and again[0] != self._last:
            return again[0]
        for index, runner in enumerate(self.runners):
            if not runner.looks_us and not runner.out:
                return index
        if again:
            return again[0]
        if self._spent_us >= self._limit_us:
            return None
        self._turns = [index for index in self._turns if self._wanted(index)]
        if not self._turns:
            wanted = [index for index in range(len(self.runners)) if self._wanted(index)]
            start = self._round % len(wanted) if wanted else 0
            self._turns = wanted[start:] + wanted[:start]
            self._round += 1
        return self._turns[0] if self._turns else None

    def turns(self) -> list[int]:
        """Return whose turns are left in this round, `next` first; a first look is a turn of its own."""
        index = self.next()
        if index is None:
            return []
        return [index] if self.is_look(index) else list(self._turns)

    def is_look(self, index: int) -> bool:
        """Say whether a candidate's next sample is a look: the first, or one that others are to agree with."""
        runner = self.runners[index]
        return not runner.looks_us or runner.doubtful

    def add(self, index: int, sample_us: float, spent_us: float = 0.0) -> None:
        """Take a sample of a candidate; taking it lasted `spent_us`."""
        runner = self.runners[index]
        if self.is_look(index):
            runner.looks_us.append(sample_us)
        else:
            runner.samples_us.append(sample_us)
            self._spent_us += spent_us
        runner.shown_us = runner.time_us
        self._last = index
        self._turns = [turn for turn in self._turns if turn != index]
        self._drop()

    def fail(self, index: int) -> None:
        """Take a candidate out that could not be run."""
        self.runners[index].out = self.runners[index].failed = True
        self.runners[index].doubtful = False

    def back_to(self, earlier: "Race") -> "Race":
        """Return the state of an earlier copy, but with what has failed since left out."""
        restored = earlier.copy()
        for index, runner in enumerate(self.runners):
            if runner.failed:
                restored.fail(index)
        return restored

    def taken_since(self, earlier: "Race") -> list[int]:
        """Return how many looks and samples each candidate has had since an earlier copy."""
        return [
            len(now.looks_us + now.samples_us) - len(then.looks_us + then.samples_us)
            for now, then in zip(self.runners, earlier.runners, strict=True)
        ]

    def copy(self) -> "Race":
        twin = Race(0, samples_min=self._samples_min, samples_max=self._samples_max, limit_us=self._limit_us)
        twin.runners = [
            Runner(list(r.looks_us), list(r.samples_us), r.out, r.failed, r.doubtful, r.shown_us) for r in self.runners
        ]
        twin._round, twin._turns, twin._spent_us, twin._last = (
            self._round, list(self._turns), self._spent_us, self._last,
        )  # fmt: skip
        return twin

    def _wanted(self, index: int) -> bool:
        samples = self.runners[index].samples_us
        if self.runners[index].out or len(samples) >= self._samples_max:
            return False
        if len(samples) < self._samples_min:
            return True
        low, high = interval(samples)
        return high - low >= max(SETTLED_SHARE * median(samples), SETTLED_US)

    def _drop(self) -> None:
        seen = [runner for runner in self.runners if not runner.failed and runner.looks_us]
        leaders = nsmallest(2, seen, key=lambda runner: runner.shown_us)
        best_us = leaders[0].shown_us
        for runner in seen:
            taken = len(runner.samples_us)
            factor = (LOOK_FACTOR, FIRST_FACTOR)[taken] if taken < 2 else LATER_FACTOR
            behind = runner.shown_us > factor * best_us and (
                taken == 0 or not any(runner is leader for leader in leaders)
            )
            alone = runner.rests_on_one and len(runner.looks_us) < LOOKS_MAX
            runner.out, runner.doubtful = behind and not alone, behind and alone
