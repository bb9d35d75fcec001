"""The least time within a budget of bytes: a price for held bytes gives bounds, labels settle what they leave."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from time import monotonic

import numpy as np

from autotuner.errors import BudgetError, InfeasibleError, ProblemError
from autotuner.solve.conditioning import with_margin
from autotuner.solve.integer_program import LONG, TOLERANCE, Budget, has_few_states, integer_program, solved
from autotuner.solve.label_setting import LabelSetting
from autotuner.solve.lagrangian_dual import FEW_LABELS, BudgetPlan, LagrangianDual, lagrangian_dual, plan_of
from autotuner.solve.lagrangian_relaxation import LagrangianRelaxation, encoded
from autotuner.solve.limits import SolverLimits
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.subproblems import Subproblem

# Prices tried for a part of the assignments, at most; a few are enough where they are begun near the best one.
MOST_PRICES = 24
# A price pays that may lift the bound by more than this share of the gap.
LIFT = 0.05
# Where the time is over before a plan is known, it is looked for so much longer.
PATIENCE_S = 1.0
# Where less than this share of the rows is left, more variables have small results.
FEWER = 0.8
# Labels are looked for within this share of the best plan above the bound first, then so many times as far.
FIRST_SHARE = 1 / 2048
WIDER = 2.5
# A part is eliminated with labels while joins make at most so many pairs.
MOST_PAIRS = 2_000_000
# An integer program of a long problem may take this share of the time, where that is limited; else so many seconds.
PROGRAM_TIME = 0.75
PROGRAM_S = 60.0
# A table of labels may have so many before the states of a variable are shared between two parts instead.
MOST_LABELS = 60_000.0


def budgeted(
    problem: Problem,
    budget_bytes: int,
    *,
    time_limit_s: float | None = None,
    epsilon: float = 0.0,
    ready: LagrangianDual | None = None,
) -> Solution:
    """Return the assignment of least total cost whose held bytes fit in the budget.

    A held byte gets a price. What is cheapest then, found as by `exact`, bounds the time of all that fits, and the best
    price gives the best bound; plans come up on the way. Rows whose bound is above the best plan are dropped. What is
    left is eliminated with labels: for each combination of states, every time that fewer bytes cost. That is tried for
    a small part of the gap first. Where labels get too many, assignments are split into two parts, by a variable's
    states, and the part of the lower bound is next.

    A problem of more than `LONG` variables with few states each is an integer program for HiGHS first, as for `exact`.

    Args:
        budget_bytes: for `held_bytes` of the answer.
        time_limit_s: when to return the best plan known, unproven.
        epsilon: the share of the bound by which the answer may lie above it; 0 for the least time.
        ready: the same problem, made ready before; it has the plans that were found for other budgets.

    Returns:
        States within the budget, `held_bytes` included. `lower_bound_us` equals `total_us` where it is proven, up to
        rounding by less than 1e-9 of it, or 1e-6 where HiGHS proved it. The same problem gives the same states, unless
        time is limited.

    Raises:
        BudgetError: the factors allow assignments, but each holds more, and `least_bytes` is what one holds at least;
            or none that fits was found in time, as the message says, and `least_bytes` is what the leanest found holds.
        InfeasibleError: the factors contradict each other.

    Cost:
        A dozen solutions by `exact`, of ever fewer rows, and an elimination with labels; exponential at worst.

    Source:
        Handler and Zang, A dual algorithm for the constrained shortest path problem (1980); Dumitrescu and Boland,
        Improved preprocessing, labeling and scaling algorithms (2003), for labels between bounds.
    """
    check_budget(budget_bytes)
    check_epsilon(epsilon)
    limits = SolverLimits(ends_at=None if time_limit_s is None else monotonic() + time_limit_s)
    best = None
    if len(problem.variables) > LONG:
        programmed = _programmed(problem, budget_bytes, limits, epsilon)
        if programmed is not None:
            best, bound_us = programmed
            if best is not None and best.time_us <= bound_us * (1 + epsilon) + 2 * TOLERANCE * (1 + best.time_us):
                is_least = best.time_us <= bound_us + 2 * TOLERANCE * (1 + best.time_us)
                bound_us = best.time_us if is_least else max(0.0, bound_us)
                return Solution(best.states, best.time_us, bound_us, "budgeted", limits.statistics(), best.held_bytes)
    ready = lagrangian_dual(problem, limits) if ready is None else ready.within(limits)
    return BudgetSearch(ready, budget_bytes, epsilon, best).solution()


def budget_of(start: LagrangianRelaxation, budget_bytes: int) -> Budget:
    """Return a budget on what labels hold, for an integer program of them."""
    return Budget(budget_bytes, {place: labels.held_bytes for place, labels in start.tables.items()})


def _programmed(
    problem: Problem, budget_bytes: int, limits: SolverLimits, epsilon: float
) -> tuple[BudgetPlan | None, float] | None:
    """Return what an integer program finds in its share of the time, and a bound.

    Returns:
        None where variables have many states, and where no plan fits, or memory does not.

    Raises:
        InfeasibleError: the factors contradict each other, whatever the budget.
    """
    network = encoded(problem)
    left = network.start.left
    if not has_few_states(left):
        return None
    program = integer_program(left, network.start.state_counts, budget_of(network.start, budget_bytes))
    if program.needed_bytes > limits.memory_bytes:
        return None
    seconds = PROGRAM_S if limits.ends_at is None else PROGRAM_TIME * (limits.ends_at - monotonic())
    try:
        found = solved(program, seconds, epsilon)
    except InfeasibleError:
        return None
    try:
        best = None if found.codes is None else plan_of(problem, network, dict(found.codes))
    except ProblemError:  # HiGHS keeps to its rows up to rounding
        best = None
    return (best if best is not None and best.held_bytes <= budget_bytes else None), found.bound_us


def check_budget(budget_bytes: int) -> None:
    """Raise ProblemError where this is no budget."""
    if budget_bytes < 0:
        raise ProblemError(f"a budget of {budget_bytes} bytes: give 0 or more")


def check_epsilon(epsilon: float) -> None:
    """Raise ProblemError where this is no share."""
    if not 0 <= epsilon < inf:
        raise ProblemError(f"epsilon is {epsilon}: give a share, 0 or more")


@dataclass(eq=False)
class BudgetSearch:
    """The search for the least time within one budget.

    Args:
        best: a plan that fits, where one is known.
    """

    ready: LagrangianDual
    budget_bytes: int
    epsilon: float
    best: BudgetPlan | None = None
    # The least bound of the parts that are settled.
    settled_us: float = inf
    prices: int = 0
    parts: int = 0
    _queue: list[tuple[float, int, Subproblem]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def solution(self) -> Solution:
        """Return the best plan.

        Raises:
            BudgetError, InfeasibleError: as `budgeted`.
        """
        best, bound_us = self.found()
        # Bounds are given with the margin of rounding, as the cutoff is.
        bound_us = best.time_us if bound_us >= with_margin(best.time_us, -3) else bound_us
        statistics = self.limits.statistics() | {"prices": self.prices, "parts": self.parts}
        return Solution(best.states, best.time_us, max(0.0, bound_us), "budgeted", statistics, best.held_bytes)

    def found(self) -> tuple[BudgetPlan, float]:
        """Return the best plan and a bound.

        Raises:
            BudgetError, InfeasibleError: as `budgeted`.
        """
        fastest, bound_us = self.ready.fastest
        if fastest.held_bytes <= self.budget_bytes:
            return fastest, bound_us
        plans = [fastest]
        if self.best is None:
            for price in self.ready.steep_prices:
                plans.append(self.ready.at(self.ready.given, price)[0])
                if plans[-1].held_bytes <= self.budget_bytes or self.limits.over:
                    break
            if plans[-1].held_bytes > self.budget_bytes:
                plans.append(self._any())
            self.best = plans[-1]
        else:
            plans.append(self.best)
        self._push(Subproblem(self.ready.given, bound_us, -1.0, plans=tuple(plans)))
        while self._queue and not self.limits.over:
            _, _, part = heapq.heappop(self._queue)
            if part.bound_us >= self._cutoff_us:
                self._settle(part.bound_us)
                continue
            self.parts += 1
            self._process(part)
        return self.best, min(self.best.time_us, self.settled_us, *(bound for bound, _, _ in self._queue))

    def _any(self) -> BudgetPlan:
        """Return a plan that fits.

        Raises:
            BudgetError: none does, or none was found in time; the message says which.
        """
        ready = self.ready
        plan, proven = (None, False) if self.limits.over else ready.fitting(self.budget_bytes)
        if plan is None and not proven and self.limits.over:
            ready = replace(ready, limits=replace(self.limits, ends_at=monotonic() + PATIENCE_S))
            plan, _ = ready.fitting(self.budget_bytes)
        if plan is not None:
            return plan
        plan, proven = ready.leanest()
        if plan.held_bytes <= self.budget_bytes:
            return plan
        # What is not proven was cut off by the limit.
        is_proven = proven or not ready.limits.over
        found = f"no assignment fits in {self.budget_bytes:,} bytes; the least that one needs is"
        if not is_proven:
            found = f"no assignment was found in time that fits in {self.budget_bytes:,} bytes; the leanest found needs"
        raise BudgetError(f"{found} {plan.held_bytes:,} bytes", plan.held_bytes, is_proven=is_proven)

    @property
    def limits(self) -> SolverLimits:
        return self.ready.limits

    @property
    def _cutoff_us(self) -> float:
        """A bound on the time of plans worth finding: those that take as long are not looked for."""
        assert self.best is not None
        return with_margin(self.best.time_us, -1) / (1 + self.epsilon)

    def _offer(self, plan: BudgetPlan) -> None:
        assert self.best is not None
        if plan.held_bytes <= self.budget_bytes and plan.time_us < self.best.time_us:
            self.best = plan

    def _push(self, part: Subproblem) -> None:
        heapq.heappush(self._queue, (part.bound_us, next(self._numbers), part))

    def _settle(self, bound_us: float) -> None:
        self.settled_us = min(self.settled_us, bound_us)

    def _process(self, part: Subproblem) -> None:
        """Settle a part, or push what it is split into."""
        try:
            part = self._climb(replace(part, given=part.given.fitting(self.budget_bytes)))
            if part.bound_us >= self._cutoff_us:
                self._settle(part.bound_us)
            elif self.limits.over:
                self._push(part)
            else:
                self._divide(part)
        except InfeasibleError:
            self._settle(self._cutoff_us)

    def _climb(self, part: Subproblem) -> Subproblem:
        """Return the part with the best bound that prices give, and without rows that this rules out.

        Raises:
            InfeasibleError: nothing is left that is better than the best plan.
        """
        budget_bytes = self.budget_bytes
        price = part.price if part.price >= 0 else part.next_price(budget_bytes)[0]
        part, rows = replace(part, own=0), part.given.rows
        if price == part.given.price:
            # Costs lie as they did when this part was split off: it may be seen at once that it is settled.
            tight = part.given.tightened().within(with_margin(self._cutoff_us + price * budget_bytes))
            part = replace(part, given=tight)
        best_us = -inf
        for _ in range(MOST_PRICES):
            if part.cheapest is not None and price == part.price and part.has(part.cheapest[0]):
                # It is the cheapest one here as well.
                plan, bound_us = part.cheapest
            else:
                self.prices += 1
                plan, bound_us = self.ready.at(part.given, price)
            self._offer(plan)
            value = bound_us - price * budget_bytes
            part = replace(part, plans=(*part.plans, plan), own=part.own + 1, bound_us=max(part.bound_us, value))
            if value > best_us:
                best_us = value
                part = replace(part, price=price, cheapest=(plan, bound_us))
            if part.bound_us >= self._cutoff_us or self.limits.over:
                break
            if price >= part.given.lean_price and plan.held_bytes > budget_bytes:
                raise InfeasibleError(f"every plan of this part holds more than {budget_bytes} bytes")
            part = replace(part, given=self._shrunk(part, price, self._cutoff_us))
            last, (price, most) = price, part.next_price(budget_bytes)
            if price == last or most - best_us <= LIFT * (self._cutoff_us - best_us):
                break
        given = part.given
        if given.rows < FEWER * rows:
            labelling = LabelSetting(given, self.limits)
            labelling.run(FEW_LABELS)
            part = replace(part, given=labelling.left())
        return part

    def _shrunk(self, part: Subproblem, price: float, most_us: float) -> LagrangianRelaxation:
        """Return the labels without those that no plan of the part can have that fits and takes so long at most."""
        return part.given.shrunk(price, with_margin(most_us + price * self.budget_bytes))

    def _divide(self, part: Subproblem) -> None:
        """Settle the part with labels, or push two parts of it."""
        # Where each variable has one state left, only labels tell assignments apart.
        settled = all(np.count_nonzero(domain) == 1 for domain in part.given.left.domains.values())
        left = self._near(part, inf if settled else MOST_PAIRS)
        if left is None:
            return
        if self.limits.over:
            self._push(left)
            return
        for half in left.halves(self.budget_bytes):
            self._push(half)

    def _near(self, part: Subproblem, most_pairs: float) -> Subproblem | None:
        """Return the part with the bound that labels ever further above it give, None where they settle it."""
        cutoff = self._cutoff_us
        distance = max(part.reach_us, FIRST_SHARE * (abs(cutoff) + cutoff - part.bound_us))
        while not self.limits.over:
            most_us = part.bound_us + distance
            last = most_us >= self._cutoff_us or most_pairs == inf
            most_us = self._cutoff_us if last else most_us
            found = self._labelled(part, most_us, most_pairs)
            if found is None:
                return part
            if found < most_us or last:
                self._settle(max(part.bound_us, found))
                return None
            part = replace(part, bound_us=most_us, reach_us=distance)
            distance *= WIDER
        return part

    def _labelled(self, part: Subproblem, most_us: float, most_pairs: float) -> float | None:
        """Return the least time up to `most_us` that fits, or that; None if labels get more than is worth waiting for.

        Args:
            most_pairs: that joins may make in all.
        """
        try:
            given = self._shrunk(part, part.price, most_us)
            labelling = LabelSetting(
                given,
                self.limits,
                most_us=with_margin(most_us + part.price * self.budget_bytes),
                most_pairs=most_pairs,
            )
            whole = labelling.eliminated(MOST_LABELS if most_pairs < inf else inf)
        except InfeasibleError:
            return most_us
        if whole is None:
            return None
        fits = np.flatnonzero(whole.held_bytes <= self.budget_bytes)
        if not len(fits):
            return most_us
        row = int(fits[np.argmin(whole.time_us[fits])])
        plan = plan_of(self.ready.problem, self.ready.encoded, whole.codes(row))
        self._offer(plan)
        return min(most_us, plan.time_us)
