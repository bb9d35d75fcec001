"""The cheapest assignment, proven: elimination on what cannot be ruled out by bounds."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count
from math import inf
from time import monotonic

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import arc_consistent
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.dominance import merged, undominated
from autotuner.solve.limits import MEMORY_BYTES, SolverLimits
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.tables import Network, encode
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
# Results that are still too large when bounds have dropped what they can may be so many times as large.
WIDER = 4
# Where all rows together cost so many times the bound, some are dropped before costs are moved.
COARSE = 1e5
# Rounding while costs move between tables stays far below this share of a total.
MARGIN = 1e-9


def exact(problem: Problem, *, time_limit_s: float | None = None, memory_limit_bytes: float = MEMORY_BYTES) -> Solution:
    """Return the assignment with the least total cost, by eliminating one variable after another.

    The problem is made arc consistent. Wide pairs of variables are split by the kinds of their states, variables that
    are forced to be equal become one, and states that another one always replaces are dropped. Variables with small
    results are eliminated, the smallest estimate first. Then a total is guessed a little above the bound, rows that no
    assignment within the guess can use are dropped, and elimination goes on; where results still grow, the states of a
    variable are shared between two cases. If nothing is found, the guess was a bound: the next one is higher.

    Args:
        problem: its parts that share no variable never meet in a table, so they are solved apart.
        time_limit_s: when to return the best plan known, unproven; as soon as there is one, where there is none yet.
        memory_limit_bytes: the most that one table may need, with what is needed to make it. A table's rows are counted
            before it is made; where it would need more, cases are split, which takes time instead.

    Returns:
        States whose total is proven, up to rounding by less than 1e-9 of it: `lower_bound_us` equals `total_us`. If the
        time was over first, `lower_bound_us` is less. The same problem gives the same states, whatever order its
        factors, their variables and their rows are in: of states that come out equal, the first by name is taken, while
        variables and factors are looked at in order of their names.

        `statistics` has the rows and bytes of the largest table, what it would have needed without bounds at most (by
        an estimate that is made first; 0 where small tables did), and the number of cases.

    Raises:
        InfeasibleError: the factors contradict each other; the message names some that do.

    Cost:
        O(n * f**w) for n variables of f states, w of them beside one another at most; far less where bounds are tight.

    Source:
        Dechter, Bucket elimination (1999); de Givry et al., Solving Max-SAT as weighted CSP (2003) for the bounds.
    """
    limits = SolverLimits(memory_limit_bytes, None if time_limit_s is None else monotonic() + time_limit_s)
    network = encode(problem)
    found = cheapest(reduced(network, limits))
    states = network.named(found.plan.codes())
    total = problem.cost_us(states)
    bound = total if found.bound_us is None else min(total, found.bound_us)
    return Solution(states, total, bound, "exact", limits.statistics())


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
    most = start.constant + sum(float(table.costs.max()) for table in start.tables.values())
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
        kept: variables that stay.
        most_rows: of a result; above it, the states of a variable are shared between two cases.
        most_cases: that are looked at, if stoppable.

    Attributes:
        stoppable: whether it stops when the time is over, or enough cases were looked at.
        stopped: whether it did.
        reason: why the last case that has no assignment has none.
    """

    def __init__(
        self,
        start: BucketElimination,
        most_us: float,
        kept: Collection[int] = (),
        most_rows: float = MOST_ROWS,
        most_cases: float = inf,
    ) -> None:
        self.most_us = most_us
        self.stoppable = False
        self.stopped = False
        self.reason = ""
        self._limits, self._kept, self._most_rows = start.limits, kept, most_rows
        self._most_cases = most_cases
        self._left = [start.copy()]

    def __iter__(self) -> Iterator[BucketElimination]:
        while self._left:
            if self.stoppable and (self._limits.over or self._most_cases <= 0):
                self.stopped = True
                return
            self._most_cases -= 1
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

    def _solved(self, case: BucketElimination) -> list[BucketElimination]:
        """Eliminate every variable of a case and return nothing, or return the cases that it splits into.

        Raises:
            InfeasibleError: no assignment of this case is as cheap as `most_us`.
        """
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
