"""Who is timed next, who is dropped, and when it is enough. Decisions only: samples are fed in, no clock is read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import takewhile
from math import comb, inf
from statistics import median

LOOK_FACTOR = 2.0
FIRST_FACTOR = 1.5
LATER_FACTOR = 1.2
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

    look_us: float | None = None
    samples_us: list[float] = field(default_factory=list)
    out: bool = False
    failed: bool = False
    median_us: float = inf

    @property
    def kept_us(self) -> list[float]:
        """The samples that count: the first look only where there is nothing else."""
        if self.samples_us or self.look_us is None:
            return self.samples_us
        return [self.look_us]


class Race:
    """Candidates that compete.

    Everyone gets one look, in the order given; then rounds over those that are left, each round starting one place
    further. After every sample, candidates above a factor times the incumbent (the lowest median) are out: 2 on the
    look alone, 1.5 with one kept sample, 1.2 with more. The look may leave one candidate; the later rules leave two.
    Who is out comes back when the incumbent turns out slower, so that a lucky sample of one candidate ends no other,
    and nobody who is out shows a lower median than the winner. A candidate is settled, and gets no further samples,
    when the 95 % interval of its median is narrower than max(1 %, 0.5 us) or it has `samples_max` samples. The race is
    over when all are out, failed or settled, or when the rounds have taken `limit_us`.
    """

    def __init__(self, count: int, *, samples_min: int, samples_max: int, limit_us: float) -> None:
        self.runners = [Runner() for _ in range(count)]
        self._samples_min, self._samples_max, self._limit_us = samples_min, samples_max, limit_us
        self._round = 0
        self._turns: list[int] = []
        self._spent_us = 0.0

    def next(self) -> int | None:
        """Return whose turn it is, or None when the race is over."""
        for index, runner in enumerate(self.runners):
            if runner.look_us is None and not runner.out:
                return index
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
        return [index] if self.runners[index].look_us is None else list(self._turns)

    def add(self, index: int, sample_us: float, spent_us: float = 0.0) -> None:
        """Take a sample of a candidate; taking it lasted `spent_us`."""
        runner = self.runners[index]
        if runner.look_us is None:
            runner.look_us = sample_us
        else:
            runner.samples_us.append(sample_us)
            self._spent_us += spent_us
        runner.median_us = median(runner.kept_us)
        self._turns = [turn for turn in self._turns if turn != index]
        self._drop()

    def fail(self, index: int) -> None:
        """Take a candidate out that could not be run."""
        self.runners[index].out = self.runners[index].failed = True

    def back_to(self, earlier: "Race") -> "Race":
        """Return the state of an earlier copy, but with what has failed since left out."""
        restored = earlier.copy()
        for index, runner in enumerate(self.runners):
            if runner.failed:
                restored.fail(index)
        return restored

    def copy(self) -> "Race":
        twin = Race(0, samples_min=self._samples_min, samples_max=self._samples_max, limit_us=self._limit_us)
        twin.runners = [Runner(r.look_us, list(r.samples_us), r.out, r.failed, r.median_us) for r in self.runners]
        twin._round, twin._turns, twin._spent_us = self._round, list(self._turns), self._spent_us
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
        seen = [runner for runner in self.runners if not runner.failed and runner.look_us is not None]
        leaders = nsmallest(2, seen, key=lambda runner: runner.median_us)
        best_us = leaders[0].median_us
        for runner in seen:
            taken = len(runner.samples_us)
            factor = (LOOK_FACTOR, FIRST_FACTOR)[taken] if taken < 2 else LATER_FACTOR
            runner.out = runner.median_us > factor * best_us and (
                taken == 0 or not any(runner is leader for leader in leaders)
            )
