"""Lagrangian dual of a budget: the cheapest plan at a price for held bytes, and the leanest plan."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from time import monotonic

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.conditioning import cheapest, with_margin
from autotuner.solve.label_setting import LabelSetting
from autotuner.solve.lagrangian_relaxation import BudgetNetwork, LagrangianRelaxation, encoded
from autotuner.solve.limits import SolverLimits
from autotuner.solve.problem import Problem
from autotuner.solve.tables import CostTable


@dataclass(frozen=True)
class BudgetPlan:
    """An assignment, its time and the bytes that it holds.

    Args:
        codes: states by number, of the variables of what was solved and of all that were eliminated before.
    """

    codes: dict[int, int]
    states: dict[str, str]
    time_us: float
    held_bytes: int


def plan_of(problem: Problem, encoded: BudgetNetwork, codes: dict[int, int]) -> BudgetPlan:
    """Return the plan with these states."""
    states = encoded.states(codes)
    return BudgetPlan(codes, states, problem.cost_us(states), problem.held_bytes(states))


def priced(
    problem: Problem, encoded: BudgetNetwork, given: LagrangianRelaxation, limits: SolverLimits
) -> tuple[BudgetPlan, float]:
    """Return the plan with the least time and price together, found as by `exact`, and a bound on the sum of both.

    Raises:
        InfeasibleError: there is no assignment.
    """
    tables = []
    for labels in given.tables.values():
        rows, table = labels.cheapest(given.state_counts), labels.table
        tables.append((rows, CostTable(table.name, table.variables, table.columns[:, rows], table.costs[rows])))
    found = cheapest(
        BucketElimination(given.names, given.state_counts, [table for _, table in tables], limits),
    )
    chosen = found.plan.codes()
    codes = dict(chosen)
    for labels, (rows, table) in zip(given.tables.values(), tables, strict=True):
        match = np.ones(table.rows, np.bool_)
        for variable, column in zip(table.variables, table.columns, strict=True):
            match &= column == chosen[variable]
        codes |= labels.codes(int(rows[np.argmax(match)]))
    bound = found.plan.constant if found.bound_us is None else found.bound_us
    return plan_of(problem, encoded, codes), with_margin(bound, -1)


# Results of so many labels are cheaper to have once than to do without at every price.
FEW_LABELS = 1_000.0
# Prices that are tried for a first plan that fits, as multiples of the fastest plan's time per held byte.
STEEP = (1.0, 4.0, 64.0)
# Where time is limited, one price may take this share of what is left of it.
SLICE = 0.25


@dataclass(frozen=True, eq=False)
class LagrangianDual:
    """A problem made ready once, to be solved for one budget after the other.

    Args:
        given: its labels, after variables with small results are eliminated: that drops no assignment worth having.
        limits: what solving it may use.
        known: what was found in time at prices of all that is given.
    """

    problem: Problem
    encoded: BudgetNetwork
    given: LagrangianRelaxation
    limits: SolverLimits
    known: dict[float, tuple[BudgetPlan, float]] = field(default_factory=dict)

    def within(self, limits: SolverLimits) -> "LagrangianDual":
        """Return the same with other limits; what either finds, the other one knows."""
        return replace(self, limits=limits)

    def at(self, given: LagrangianRelaxation, price: float) -> tuple[BudgetPlan, float]:
        """Return the cheapest plan where a held byte costs `price`, and the bound on its time and price together.

        Raises:
            InfeasibleError: there is no assignment.
        """
        if given is self.given and price in self.known:
            return self.known[price]
        ends_at = self.limits.ends_at
        if ends_at is not None:
            now = monotonic()
            self.limits.ends_at = min(ends_at, now + SLICE * max(0.0, ends_at - now))
        try:
            found = priced(self.problem, self.encoded, given.at(price), self.limits)
            if given is self.given and not self.limits.over:
                self.known[price] = found
            return found
        finally:
            self.limits.ends_at = ends_at

    @cached_property
    def fastest(self) -> tuple[BudgetPlan, float]:
        """The plan of least time, and a bound on the times of all."""
        return self.at(self.given, 0.0)

    @cached_property
    def steep_prices(self) -> tuple[float, ...]:
        """Prices at which bytes count for much, but not for all."""
        plan, _ = self.fastest
        return tuple(times * plan.time_us / (1 + plan.held_bytes) for times in STEEP)

    def fitting(self, budget_bytes: int) -> tuple[BudgetPlan | None, bool]:
        """Return a plan within the budget, None where none was found; and whether that is proven."""
        try:
            plan, proven = self._fewest_held(self.given.fitting(budget_bytes))
        except InfeasibleError:
            return None, True
        return (plan, True) if plan.held_bytes <= budget_bytes else (None, proven)

    def leanest(self) -> tuple[BudgetPlan, bool]:
        """Return the plan that holds the fewest bytes, and whether that is proven.

        Raises:
            InfeasibleError: there is no assignment.
        """
        plan, proven = self._fewest_held(self.given)
        return plan, proven and not self.limits.over

    def _fewest_held(self, given: LagrangianRelaxation) -> tuple[BudgetPlan, bool]:
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


def lagrangian_dual(problem: Problem, limits: SolverLimits) -> LagrangianDual:
    """Return the problem made ready.

    Raises:
        InfeasibleError: the factors contradict each other.
    """
    found = encoded(problem)
    labelling = LabelSetting(found.start, limits)
    labelling.run(FEW_LABELS)
    return LagrangianDual(problem, found, labelling.left(), limits)
