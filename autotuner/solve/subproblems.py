"""Subproblems of branch and bound under a budget, the plans known of each, and its split in two."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import Consistent
from autotuner.solve.lagrangian_dual import BudgetPlan
from autotuner.solve.lagrangian_relaxation import LagrangianRelaxation

# Prices are multiplied by this to find plans on the other side of the budget, then by its square, and so on, so often.
NEAR_PRICE = 1.5
FEW_STEPS = 6


@dataclass(frozen=True, eq=False)
class Subproblem:
    """Some of the assignments.

    Args:
        bound_us: none that fits in the budget takes less.
        price: in microseconds per held byte, the best one of the part that this was split from; below 0 for none.
        cheapest: the cheapest plan at that price, and the bound on time and price together that it came with.
        reach_us: how far above the bound labels were looked for with success.
        plans: that prices have brought up, of what this was split from as well.
        own: how many of them, from the end, are surely of this part.
    """

    given: LagrangianRelaxation
    bound_us: float
    price: float
    cheapest: tuple[BudgetPlan, float] | None = None
    reach_us: float = 0.0
    plans: tuple[BudgetPlan, ...] = ()
    own: int = 0

    def has(self, plan: BudgetPlan) -> bool:
        """Say whether the plan may be one of the part: its states are left."""
        return all(domain[plan.codes[v]] for v, domain in self.given.left.domains.items())

    def on_side(self, most_bytes: int, above: bool) -> list[BudgetPlan]:
        """Return the plans of the part that hold more than so many bytes, or those that do not, fastest first."""
        held = [plan for plan in self.plans if (plan.held_bytes > most_bytes) == above]
        own = [plan for plan in held if self.has(plan)]
        return sorted(own, key=lambda plan: (plan.time_us, plan.held_bytes))

    def next_price(self, budget_bytes: int) -> tuple[float, float]:
        """Return the price at which the bound may be highest, and how high that may be."""
        over, under = self.on_side(budget_bytes, True), self.on_side(budget_bytes, False)
        # The best price is near that of the part that this was split from; else it is looked for ever further away.
        away = NEAR_PRICE ** (1 << min(self.own, 16) >> 1) if self.own < FEW_STEPS else inf
        if not under:
            return (min(self.given.lean_price, away * self.price) if self.price > 0 else self.given.lean_price), inf
        if not over:
            return (self.price / away if self.price > 1e-6 * self.given.lean_price else 0.0), inf
        lines = [(plan.time_us, plan.held_bytes - budget_bytes) for plan in (*over, *under)]
        best_price, most = 0.0, -inf
        for time, excess in lines[: len(over)]:
            for other_time, other_excess in lines[len(over) :]:
                at = max(0.0, (other_time - time) / (excess - other_excess))
                value = min(t + at * e for t, e in lines)
                if value > most:
                    best_price, most = at, value
        return best_price, most

    def halves(self, budget_bytes: int) -> "Iterator[Subproblem]":
        """Yield the part twice, with two shares of the states in which plans above and below the budget differ most."""
        left = self.given.left
        bytes_of = {p: t.table.costing(t.held_bytes.astype(np.float64)) for p, t in self.given.tables.items()}
        held = Consistent(left.names, bytes_of, left.domains, left.readers)
        variable, split = -1, inf
        over, under = self.on_side(budget_bytes, True), self.on_side(budget_bytes, False)
        if over and under:
            most = 0.0
            for v in left.readers:
                one, other = over[-1].codes[v], under[0].codes[v]
                needed = held.cheapest(v)
                if needed[one] - needed[other] > most:
                    variable, most, split = v, needed[one] - needed[other], (needed[one] + needed[other]) / 2
        if variable >= 0:
            lower = left.domains[variable] & (held.cheapest(variable) <= split)
        else:
            rows = {v: sum(left.tables[place].rows for place in left.readers[v]) for v in left.readers}
            variable = max(rows, key=lambda v: (len(left.states(v)) > 1, rows[v], -v))
            states = left.states(variable)
            costs = self.given.at(self.price).left.cheapest(variable)
            ranked = states[np.argsort(costs[states], kind="stable")]
            lower = np.zeros_like(left.domains[variable])
            lower[ranked[: (len(ranked) + 1) // 2]] = True
        for half in (lower, left.domains[variable] & ~lower):
            try:
                yield replace(self, given=self.given.narrowed(variable, half))
            except InfeasibleError:
                continue
