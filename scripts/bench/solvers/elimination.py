"""Elimination of a part of a long problem: some variables stay, or have states already, and effort is limited."""

from collections.abc import Collection, Mapping
from math import inf

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.conditioning import DROPPED, Cases, with_margin

MOST_ROWS = 4_500.0
# Results that are still too large when bounds have dropped what they can may be so many times as large.
WIDER = 4


class PartCases(Cases):
    """The same cases where some variables stay, or no more than so many cases are looked at.

    Args:
        kept: variables that stay.
        most_rows: of a result; above it, the states of a variable are shared between two cases.
        most_cases: that are looked at, if stoppable.
    """

    def __init__(
        self,
        start: BucketElimination,
        most_us: float,
        kept: Collection[int] = (),
        most_rows: float = MOST_ROWS,
        most_cases: float = inf,
    ) -> None:
        super().__init__(start, most_us)
        self._kept, self._most_rows, self._most_cases = kept, most_rows, most_cases

    @property
    def _is_over(self) -> bool:
        return self._limits.over or self._most_cases <= 0

    def _solved(self, case: BucketElimination) -> list[BucketElimination]:
        self._most_cases -= 1
        most_rows = MOST_ROWS
        while True:
            before = case.rows
            case.tighten(self.most_us)
            few_dropped = case.rows > (1 - DROPPED) * before
            if case.run(most_rows, self._kept):
                return []
            if few_dropped:
                if most_rows >= self._most_rows:
                    return case.halves()
                most_rows *= WIDER


def cheaper(
    start: BucketElimination, most_us: float, step_us: float, raised: float, most_cases: int
) -> BucketElimination | None:
    """Return the cheapest assignment, or None where none that costs less than `most_us` is found with some effort.

    Args:
        step_us: how far above the bound the first guess lies.
        raised: a guess that nothing is found below is raised by this factor of its distance from the bound.
        most_cases: that are looked at for each guess.
    """
    try:
        start = start.copy()
        guess = bound = start.tighten(with_margin(most_us, -1))
    except InfeasibleError:
        return None
    while guess < most_us:
        guess = min(most_us, bound + max(step_us, raised * (guess - bound)))
        cases, best = PartCases(start, with_margin(guess, -1), most_cases=most_cases), None
        cases.stoppable = True
        for case in cases:
            if case.constant <= cases.most_us:
                best, cases.most_us = case, with_margin(case.constant, -1)
        if best is not None:
            return best
        if cases.stopped:
            return None
    return None


def fixed(start: BucketElimination, states: Mapping[int, int]) -> BucketElimination:
    """Return an elimination of the same with these states of variables that are left.

    Raises:
        InfeasibleError: nothing is left.
    """
    domains = start.consistent().domains
    only = {v: np.arange(len(domains[v])) == state for v, state in states.items() if v in domains}
    return start.narrowed({v: domains[v] & domain for v, domain in only.items()})


def parts(whole: BucketElimination) -> list[BucketElimination]:
    """Return an elimination for each part that shares no variable with others, without argmin tables."""
    found: list[BucketElimination] = []
    met: set[int] = set()
    for root in whole.readers:
        if root in met:
            continue
        met.add(root)
        queue, places = [root], dict[int, None]()
        for v in queue:
            new = dict.fromkeys(place for place in whole.readers[v] if place not in places)
            places |= new
            beside = dict.fromkeys(u for place in new for u in whole.tables[place].variables if u not in met)
            met |= beside.keys()
            queue += beside
        tables = [whole.tables[place] for place in places]
        found.append(BucketElimination(whole.names, whole.state_counts, tables, whole.limits))
    return found
