"""Many equal layers in a row within one budget: labels of a layer by the states of its ends, joined layer by layer."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf
from time import monotonic

from autotuner.errors import BudgetError, InfeasibleError
from autotuner.problem import Factor, Memory, Problem, Solution
from autotuner.solvers.budgeted import check_budget, check_epsilon
from autotuner.solvers.exact import with_margin
from autotuner.solvers.joined_layers import Joined
from autotuner.solvers.labelled import Encoded, Labelled, encoded
from autotuner.solvers.labelling import Labelling
from autotuner.solvers.limits import MEMORY_BYTES, Limits, TooLargeError
from autotuner.solvers.prepared import FEW_LABELS, STEEP
from autotuner.solvers.priced import priced
from autotuner.solvers.repeated import check_joints, exact_repeated

# Prices tried for a layer; each is one solution of it.
MOST_PRICES = 20
# How far above the bound plans are looked for first, as a share of a layer's time; then so many times as far.
FIRST_SHARE = 1 / 64
WIDER = 4.0
# A table may have so many labels, of a layer and of all layers so far.
MOST_LABELS = 60_000.0


def budgeted_repeated(
    layer: Problem,
    joints: Mapping[str, str],
    count: int,
    budget_bytes: int,
    *,
    time_limit_s: float | None = None,
    memory_limit_bytes: float = MEMORY_BYTES,
    epsilon: float = 0.0,
) -> Solution:
    """Return the assignment of least total cost for `chained(layer, joints, count)` within a budget.

    Layers may differ in their plans. What they hold adds up, what they need for a while is the largest of all. As in
    `chained`, both copies of a joined variable have all of the layer's factors: what a factor of such a variable costs
    and holds counts on either side of the joint. So give what a joined tensor holds to the layer that makes it, by
    leaving it out at the variable that the joint leads to.

    A price for held bytes makes layers independent, but for their ends; that bounds the total. All assignments of a
    layer that lie within some distance of its best at that price are found as labels, by the states of its ends. They
    are joined layer by layer. Where a plan is found within that distance of the bound, no other is better; else the
    distance grows.

    Args:
        joints: variable -> the next layer's variable that takes the same state (of those that both have).
        count: of layers.
        budget_bytes: for `Memory.total_bytes` of the answer.
        time_limit_s: when to return the best plan known, unproven; as soon as there is one, where there is none yet.
        memory_limit_bytes: the most that one table may need, with what is needed to make it.
        epsilon: the share of the bound by which the answer may lie above it; 0 for the least time.

    Returns:
        States of variables `0:x`, `1:x`, and so on. `lower_bound_us` is less than `total_us` where the time was over or
        labels got too many.

    Raises:
        BudgetError: the factors allow assignments, but each needs more; the message and `least_bytes` say how much.
        InfeasibleError: no assignment satisfies every factor.
        ProblemError: as `chained`.

    Cost:
        Some solutions of one layer, one elimination of it with labels per distance, and O(count) joins of its labels.

    Source:
        Handler and Zang, A dual algorithm for the constrained shortest path problem (1980), over layers as steps.
    """
    check_joints(layer, joints, count)
    check_budget(budget_bytes)
    check_epsilon(epsilon)
    limits = Limits(memory_limit_bytes, None if time_limit_s is None else monotonic() + time_limit_s)
    fastest = exact_repeated(layer, joints, count, memory_limit_bytes=memory_limit_bytes)
    chain = _Chain(layer, joints, count, budget_bytes, limits, epsilon)
    fastest = replace(fastest, solver="budgeted_repeated", memory=chain.memory(fastest))
    return fastest if fastest.memory.total_bytes <= budget_bytes else chain.solution(fastest)


@dataclass(eq=False)
class _Chain:
    layer: Problem
    joints: Mapping[str, str]
    count: int
    budget_bytes: int
    limits: Limits
    epsilon: float
    best: Solution | None = None
    bound_us: float = 0.0
    prices: int = 0
    distances: int = 0

    @cached_property
    def encoded(self) -> Encoded:
        return encoded(self.layer, list(dict.fromkeys([*self.joints.values(), *self.joints])))

    @property
    def kept(self) -> set[int]:
        names = self.encoded.network.names
        return {names.index(name) for name in (*self.joints, *self.joints.values())}

    def memory(self, solution: Solution) -> Memory:
        """Return what a plan for all layers needs."""
        names = self.layer.variables
        needed = [self.layer.memory({v: solution.states[f"{i}:{v}"] for v in names}) for i in range(self.count)]
        held = sum(each.held_bytes for each in needed)
        return Memory(held, max(each.transient_bytes for each in needed))

    def solution(self, fastest: Solution) -> Solution:
        """Return the best plan that fits; the fastest of all does not.

        Raises:
            BudgetError: none does.
        """
        self.bound_us = fastest.lower_bound_us
        # No plan is left that is looked for, or too many are.
        with suppress(InfeasibleError, TooLargeError):
            self._search()
        if self.best is None:
            self._offer(self._leanest())
        best = self.best
        assert best is not None
        bound = best.total_us if self.bound_us >= with_margin(best.total_us, -3) else max(0.0, self.bound_us)
        statistics = self.limits.statistics() | {"prices": self.prices, "distances": self.distances}
        return replace(best, lower_bound_us=bound, statistics=statistics)

    def _search(self) -> None:
        """Look for the best plan, ever further from the bound.

        Raises:
            InfeasibleError: nothing fits.
            TooLargeError: labels get too many.
        """
        start = self.encoded.start
        start = start.capped(self.budget_bytes - self.count * start.least_held())
        labelling = Labelling(start, self.limits, kept=self.kept)
        labelling.run(FEW_LABELS)
        given = labelling.left()
        floor = given.least_transient
        room = self.budget_bytes - floor
        price, least_us = self._price(given, room)
        base_us = self.count * least_us - price * room
        self.bound_us = max(self.bound_us, base_us)
        dearest = sum(float(t.time_us.max() + price * t.held_bytes.max()) for t in given.tables.values())
        distance = FIRST_SHARE * (least_us + 1e-9)
        while True:
            self.distances += 1
            joined = Joined(self.encoded, self.joints, self.count, floor, price)
            slack = self.epsilon / 2 * self.bound_us / self.count
            with suppress(InfeasibleError):
                layer = given.shrunk(price, with_margin(least_us + distance), floor)
                plan = joined.best(
                    layer, self.kept, self.limits, self.budget_bytes, least_us, distance, slack, MOST_LABELS
                )
                if plan is not None:
                    self._offer(self._written(plan))
            # What fits and is not among the labels takes more.
            reached = base_us + distance if self.best is None else min(base_us + distance, self.best.total_us)
            self.bound_us = max(self.bound_us, reached - joined.spent_us)
            if self._is_proven or distance > self.count * dearest or (self.limits.over and self.best is not None):
                return
            before, distance = distance, WIDER * distance
            if self.best is not None:
                distance = min(distance, with_margin(self.best.total_us) - base_us)
            if distance <= before:
                return

    @property
    def _is_proven(self) -> bool:
        if self.best is None:
            return False
        return self.bound_us >= with_margin(self.best.total_us, -2) / (1 + self.epsilon)

    def _offer(self, plan: Solution) -> None:
        if self.best is None or plan.total_us < self.best.total_us:
            self.best = plan

    def _written(self, plan: list[dict[int, int]]) -> Solution:
        layers = [self.encoded.states(codes) for codes in plan]
        total = fsum(self.layer.cost_us(states) for states in layers)
        states = {f"{i}:{name}": state for i, each in enumerate(layers) for name, state in each.items()}
        solution = Solution(states, total, 0.0, "budgeted_repeated")
        return replace(solution, memory=self.memory(solution))

    def _price(self, given: Labelled, room: int) -> tuple[float, float]:
        """Return the price at which layers that are independent bound the total best, and what one costs then."""
        best = (-inf, 0.0, 0.0)
        lines: list[tuple[float, int]] = []
        price = 0.0
        for _ in range(MOST_PRICES):
            self.prices += 1
            found = priced(self.layer, self.encoded, given.at(price), self.limits)
            best = max(best, (self.count * found.bound_us - price * room, price, found.bound_us))
            lines.append((self.count * found.plan.time_us, self.count * found.plan.memory.held_bytes - room))
            over = [line for line in lines if line[1] > 0]
            under = [line for line in lines if line[1] <= 0]
            if not under:
                steep = STEEP[0] * found.plan.time_us / (1 + found.plan.memory.held_bytes)
                following = max(8 * price, steep, 1e-12)
            elif not over:
                break
            else:
                crossings = [(min(t + at * e for t, e in lines), at) for time, excess in over for other, below in under
                             for at in [max(0.0, (other - time) / (excess - below))]]  # fmt: skip
                most, following = max(crossings)
                if most <= with_margin(best[0], 3):
                    break
            if following == price:
                break
            price = following
        return best[1], best[2]

    def _leanest(self) -> Solution:
        """Return a plan within the budget, the one with the fewest bytes.

        Raises:
            BudgetError: it does not fit.
        """
        leanest, cap = None, max((c for f in self.layer.factors for c in f.transient_bytes.values()), default=0)
        while True:
            try:
                found = exact_repeated(self._lean(cap), self.joints, self.count)
            except InfeasibleError:
                break
            needed = self.memory(found)
            if leanest is None or needed.total_bytes < leanest.memory.total_bytes:
                leanest = replace(found, memory=needed)
            cap = min(needed.transient_bytes, leanest.memory.total_bytes - needed.held_bytes) - 1
        assert leanest is not None
        needed = leanest.memory
        if needed.total_bytes > self.budget_bytes:
            raise BudgetError(
                f"no assignment of {self.count} layers fits in {self.budget_bytes:,} bytes; the least that one needs is"
                f" {needed.total_bytes:,} bytes, {needed.held_bytes:,} of them held and {needed.transient_bytes:,} for"
                " a while",
                needed.total_bytes,
            )
        layers = [{v: leanest.states[f"{i}:{v}"] for v in self.layer.variables} for i in range(self.count)]
        total = fsum(self.layer.cost_us(states) for states in layers)
        return replace(leanest, total_us=total, lower_bound_us=0.0, solver="budgeted_repeated")

    def _lean(self, most_bytes: int) -> Problem:
        """Return the layer with held bytes as costs, without rows that need more for a while."""
        return Problem(
            tuple(
                Factor(
                    factor.name,
                    factor.variables,
                    {
                        row: float(factor.held_bytes.get(row, 0))
                        for row in factor.table
                        if factor.transient_bytes.get(row, 0) <= most_bytes
                    },
                )
                for factor in self.layer.factors
            )
        )
