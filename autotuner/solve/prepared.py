"""A problem with bytes made ready for one budget after the other, and the fewest bytes that it can do with."""

from dataclasses import dataclass
from functools import cached_property
from time import monotonic

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
    """Return an assignment that holds the fewest bytes; its time is not the least of all that hold as many.

    Args:
        time_limit_s: when to return the best plan known; others may hold less.
        memory_limit_bytes: the most that one table may need, with what is needed to make it.

    Raises:
        InfeasibleError: the factors contradict each other.
    """
    limits = Limits(memory_limit_bytes, None if time_limit_s is None else monotonic() + time_limit_s)
    plan, _ = prepared(problem, limits).leanest()
    return Solution(plan.states, plan.time_us, 0.0, "least_bytes", limits.statistics(), plan.held_bytes)


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
        return tuple(times * plan.time_us / (1 + plan.held_bytes) for times in STEEP)

    def fitting(self, budget_bytes: int) -> tuple[Plan | None, bool]:
        """Return a plan within the budget, None where none was found; and whether that is proven."""
        try:
            plan, proven = self._fewest_held(self.given.fitting(budget_bytes))
        except InfeasibleError:
            return None, True
        return (plan, True) if plan.held_bytes <= budget_bytes else (None, proven)

    def leanest(self) -> tuple[Plan, bool]:
        """Return the plan that holds the fewest bytes, and whether that is proven.

        Raises:
            InfeasibleError: there is no assignment.
        """
        plan, proven = self._fewest_held(self.given)
        return plan, proven and not self.limits.over

    def _fewest_held(self, given: Labelled) -> tuple[Plan, bool]:
        """Return a plan that holds the fewest bytes, and whether that is proven.

        A price that is far from extreme mostly gives one, and a bound on bytes alone proves it, in much less time than
        a price that makes each byte worth more than any time.
        """
        plan, _ = self.at(given, min(self.steep_prices[-1], given.lean_price))
        if plan.held_bytes <= given.least_held():
            return plan, True
        if self.limits.over:
            return plan, False
        plan, bound_us = self.at(given, given.lean_price)
        # All that hold less would be cheaper by more than the most that times differ.
        saved_us = given.lean_price * (plan.held_bytes - given.unit_bytes / 2)
        return plan, with_margin(bound_us) >= plan.time_us + saved_us


def prepared(problem: Problem, limits: Limits) -> Prepared:
    """Return the problem made ready.

    Raises:
        InfeasibleError: the factors contradict each other.
    """
    found = encoded(problem)
    labelling = Labelling(found.start, limits)
    labelling.run(FEW_LABELS)
    return Prepared(problem, found, labelling.left(), limits)
