"""A problem with bytes made ready for one budget after the other, and the fewest bytes that it can do with."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from time import monotonic

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.exact import with_margin
from autotuner.solve.labelled import Encoded, Labelled, encoded
from autotuner.solve.labelling import Labelling
from autotuner.solve.limits import MEMORY_BYTES, Limits
from autotuner.solve.priced import Plan, priced
from autotuner.solve.problem import Problem, Solution

# Results of so many labels are cheaper to have once than to do without at every price.
FEW_LABELS = 1_000.0
# Prices that are tried for a first plan that fits, as multiples of the fastest plan's time per held byte.
STEEP = (1.0, 4.0, 64.0)
# Where time is limited, one price may take this share of what is left of it.
SLICE = 0.25


def least_bytes(
    problem: Problem, *, time_limit_s: float | None = None, memory_limit_bytes: float = MEMORY_BYTES
) -> Solution:
    """Return an assignment that needs the fewest bytes; its time is not the least of all that need as many.

    Args:
        time_limit_s: when to return the best plan known; others may need less.
        memory_limit_bytes: the most that one table may need, with what is needed to make it.

    Raises:
        InfeasibleError: the factors contradict each other.
    """
    limits = Limits(memory_limit_bytes, None if time_limit_s is None else monotonic() + time_limit_s)
    plan, _ = prepared(problem, limits).leanest()
    return Solution(plan.states, plan.time_us, 0.0, "least_bytes", limits.statistics(), plan.memory)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A problem made ready once, to be solved for one budget after the other.

    Args:
        given: its labels, after variables with small results are eliminated: that drops no assignment worth having.
    """

    problem: Problem
    encoded: Encoded
    given: Labelled
    limits: Limits

    def at(self, given: Labelled, price: float) -> tuple[Plan, float]:
        """Return the cheapest plan where a held byte costs `price`, and the bound on its time and price together.

        Raises:
            InfeasibleError: there is no assignment.
        """
        ends_at = self.limits.ends_at
        if ends_at is not None:
            now = monotonic()
            self.limits.ends_at = min(ends_at, now + SLICE * max(0.0, ends_at - now))
        try:
            found = priced(self.problem, self.encoded, given.at(price), self.limits)
        finally:
            self.limits.ends_at = ends_at
        return found.plan, found.bound_us

    @cached_property
    def fastest(self) -> tuple[Plan, float]:
        """The plan of least time, and a bound on the times of all."""
        return self.at(self.given, 0.0)

    @cached_property
    def steep_prices(self) -> tuple[float, ...]:
        """Prices at which bytes count for much, but not for all."""
        plan, _ = self.fastest
        return tuple(times * plan.time_us / (1 + plan.memory.held_bytes) for times in STEEP)

    def fitting(self, budget_bytes: int) -> tuple[Plan | None, bool]:
        """Return a plan within the budget, None where none was found; and whether that is proven.

        Of plans that hold the fewest bytes, the one found may need too much for a while. So rows that need more than
        what is left of the budget are dropped, and the fewest held bytes are looked for again.
        """
        proven = True
        try:
            given = self.given.fitting(budget_bytes, self.given.least_transient)
            while True:
                plan, fewest = self._fewest_held(given)
                proven = proven and fewest
                if plan.memory.total_bytes <= budget_bytes:
                    return plan, True
                if plan.memory.held_bytes > budget_bytes or self.limits.over:
                    return None, proven and plan.memory.held_bytes > budget_bytes
                given = given.capped(budget_bytes - plan.memory.held_bytes)
        except InfeasibleError:
            return None, proven

    def leanest(self) -> tuple[Plan, bool]:
        """Return the plan with the fewest bytes, and whether that is proven.

        Whatever is dropped of what may be needed for a while, held bytes can only grow. So the least that plans with
        the fewest held bytes need is looked for by halves, then it is dropped, and again.

        Raises:
            InfeasibleError: there is no assignment.
        """
        given, levels = self.given, self.given.levels
        best, proven = self._fewest_held(given)
        plan = best
        while not self.limits.over:
            low, high = 0, int(np.searchsorted(levels, plan.memory.transient_bytes))
            while low < high and not self.limits.over:
                middle = (low + high) // 2
                other, fewest = self._capped(given, int(levels[middle]))
                proven = proven and fewest
                if other is not None and other.memory.held_bytes == plan.memory.held_bytes:
                    plan, high = other, int(np.searchsorted(levels, other.memory.transient_bytes))
                else:
                    low = middle + 1
            best = min(best, plan, key=lambda plan: plan.memory.total_bytes)
            place = min(high, int(np.searchsorted(levels, best.memory.total_bytes - plan.memory.held_bytes))) - 1
            if place < 0:
                return best, proven
            levels = levels[: place + 1]
            found, fewest = self._capped(given, int(levels[place]))
            proven = proven and fewest
            if found is None:
                return best, proven
            plan = found
        return best, False

    def _capped(self, given: Labelled, most_bytes: int) -> tuple[Plan | None, bool]:
        try:
            return self._fewest_held(given.capped(most_bytes))
        except InfeasibleError:
            return None, True

    def _fewest_held(self, given: Labelled) -> tuple[Plan, bool]:
        """Return a plan that holds the fewest bytes, and whether that is proven.

        A price that is far from extreme mostly gives one, and a bound on bytes alone proves it, in much less time than
        a price that makes each byte worth more than any time.
        """
        plan, _ = self.at(given, min(self.steep_prices[-1], given.lean_price))
        if plan.memory.held_bytes <= given.least_held():
            return plan, True
        if self.limits.over:
            return plan, False
        plan, bound_us = self.at(given, given.lean_price)
        # All that hold less would be cheaper by more than the most that times differ.
        saved_us = given.lean_price * (plan.memory.held_bytes - given.unit_bytes / 2)
        return plan, with_margin(bound_us) >= plan.time_us + saved_us


def prepared(problem: Problem, limits: Limits, kept: Collection[str] = ()) -> Prepared:
    """Return the problem made ready.

    Args:
        kept: variables that stay, if only as one of those that they are forced to be equal to.

    Raises:
        InfeasibleError: the factors contradict each other.
    """
    found = encoded(problem)
    names = found.network.names
    labelling = Labelling(found.start, limits, kept={names.index(name) for name in kept})
    labelling.run(FEW_LABELS)
    return Prepared(problem, found, labelling.left(), limits)
