"""Conditioning: elimination on what bounds cannot rule out; where it grows, a variable's states make two cases."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import inf

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import arc_consistent
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.dominance import merged, undominated
from autotuner.solve.limits import SolverLimits
from autotuner.solve.tables import Network
from autotuner.solve.variable_splitting import split

# Tables of this many rows cost less to make than to avoid; above it, bounds drop rows first, and cases are split.
MOST_ROWS = 4_500.0
# Rows that the bounds must drop, as a share, for another round on the same variables to pay.
DROPPED = 0.15
# Guesses spare as many rows above their table's cheapest as these, each next one half as many again; but a guess lies
# above the one before by no more than this share of how far that was above the bound: one far too high is slow.
SPARED = 11_000
RAISED = 1.5
GROWTH = 0.5
# Where a plan is known, and its total spares no more rows than these, it is the next guess.
LEAP = 16_000
# Where all rows together cost so many times the bound, some are dropped before costs are moved.
COARSE = 1e5
# Rounding while costs move between tables stays far below this share of a total.
MARGIN = 1e-9


def reduced(network: Network, limits: SolverLimits) -> BucketElimination:
    """Return an elimination of what is left of a problem when all is done that costs little and changes no optimum.

    Raises:
        InfeasibleError: nothing is left.
    """
    parts = split(arc_consistent(network), network.state_counts)
    left, argmins = merged(undominated(parts.left, parts.state_counts), parts.state_counts)
    return BucketElimination(left.names, parts.state_counts, left.tables.values(), limits, argmins)


@dataclass(frozen=True)
class Found:
    """A complete elimination, and a bound below which no plan lies; None where the plan itself is the bound."""

    plan: BucketElimination
    bound_us: float | None


def cheapest(start: BucketElimination, least_us: float = 0.0, reached_us: float = inf) -> Found:
    """Return the cheapest assignment, or the best one when the time is over; guesses rise until one holds.

    Args:
        least_us: what is known already to be the least that an assignment can cost.
        reached_us: what some assignment is known to cost.

    Raises:
        InfeasibleError: there is no assignment.
    """
    if start.run(MOST_ROWS):
        return Found(start, None)
    start.limits.estimated_bytes = start.estimated_bytes()
    most = start.most_us
    best = None
    if most > COARSE * (start.bound_us + 1):
        # Rows dearer than a whole assignment go before any cost is moved: sums with them would be rounded coarsely.
        best = start.dive()
        most = most if best is None else best.constant
    most = min(most, reached_us)
    bound = start.tighten(with_margin(most))
    proven = max(bound, least_us)
    spares = start.spares()
    # Where more is known than the bound says, that many rows are spared already.
    known = int(np.searchsorted(spares, proven - bound))
    for number in count():
        if best is None and reached_us == inf and (number or start.limits.ends_at is not None):
            best = start.dive()
            most = most if best is None else min(most, best.constant)
        spared = known + int(SPARED * RAISED**number)
        guess = bound + float(spares[spared]) if spared < len(spares) else most
        if number:
            guess = min(guess, proven + max((proven - bound) * GROWTH, (most - bound) / 256))
        reached = best is not None or reached_us < inf
        if reached and np.searchsorted(spares, most - bound) <= known + LEAP:
            guess = most
        guess = min(guess, most)
        cases, within = Cases(start, with_margin(guess)), None
        cases.stoppable = best is not None
        for case in cases:
            if case.constant <= cases.most_us:
                within, cases.most_us, cases.stoppable = case, with_margin(case.constant, -1), True
            if best is None or case.constant < best.constant:
                best, most = case, case.constant
        if cases.stopped and best is not None:
            return Found(best, with_margin(proven, -1))
        if within is not None:
            return Found(within, None)
        if guess >= most:
            if best is not None and best.constant <= with_margin(most):  # rounding alone hid it
                return Found(best, with_margin(best.constant, -3))
            raise InfeasibleError(f"no assignment satisfies every factor; in the last case tried, {cases.reason}")
        proven = guess
    raise AssertionError("guesses rise until they reach the most that there can be")


def with_margin(total_us: float, sign: int = 1) -> float:
    """Return the total, higher (or, with sign -1, lower) by what rounding may have changed it."""
    return total_us + sign * MARGIN * (1 + abs(total_us))


class Cases:
    """The complete eliminations of the cases that share out the assignments up to a total.

    Rows of dearer assignments are dropped only where a bound shows them, so a case may end above the total.

    Args:
        most_us: may be lowered on the way.

    Attributes:
        stoppable: whether it stops when the time is over.
        stopped: whether it did.
        reason: why the last case that has no assignment has none.
    """

    def __init__(self, start: BucketElimination, most_us: float) -> None:
        self.most_us = most_us
        self.stoppable = False
        self.stopped = False
        self.reason = ""
        self._limits = start.limits
        self._left = [start.copy()]

    def __iter__(self) -> Iterator[BucketElimination]:
        while self._left:
            if self.stoppable and self._is_over:
                self.stopped = True
                return
            case = self._left.pop()
            self._limits.cases += 1
            try:
                halves = self._solved(case)
            except InfeasibleError as error:
                self.reason = str(error)
                continue
            self._left.extend(reversed(halves))
            if not halves:
                yield case

    @property
    def _is_over(self) -> bool:
        return self._limits.over

    def _solved(self, case: BucketElimination) -> list[BucketElimination]:
        """Eliminate every variable of a case and return nothing, or return the cases that it splits into.

        Raises:
            InfeasibleError: no assignment of this case is as cheap as `most_us`.
        """
        while True:
            before = case.rows
            case.tighten(self.most_us)
            few_dropped = case.rows > (1 - DROPPED) * before
            if case.run(MOST_ROWS):
                return []
            if few_dropped:
                return case.halves()
