"""Many equal layers in a row within one budget: labels of a layer by the states of its ends, joined layer by layer."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf
from time import monotonic

import numpy as np

from autotuner.errors import BudgetError, InfeasibleError
from autotuner.solve.budgeted import check_budget, check_epsilon
from autotuner.solve.exact import with_margin
from autotuner.solve.joined_layers import Joined
from autotuner.solve.labelled import Encoded, Labelled, encoded
from autotuner.solve.labelling import Labelling
from autotuner.solve.labels import Labels
from autotuner.solve.limits import MEMORY_BYTES, Limits, TooLargeError
from autotuner.solve.prepared import FEW_LABELS
from autotuner.solve.priced import Plan, priced
from autotuner.solve.problem import Memory, Problem, Solution
from autotuner.solve.repeated import check_joints
from autotuner.solve.ring import Ring
from autotuner.solve.tables import Table

# How often what a plan leaves of the budget is spent on one of its layers, and all are mixed anew.
FILLINGS = 2
# With so many combinations of states at the joints, prices are tried again.
ALIKE = 2
# Of layers that prices bring up, so much of a layer's time may be lost at each joint where labels are many.
LOSS = 1e-5
# How far above the bound plans are looked for first, as a share of a layer's time; then so many times as far.
FIRST_SHARE = 1 / 1024
WIDER = 4.0
# So many distances without a plan that fits, and it is asked whether there is one.
PATIENCE = 3
# Joins of a layer's labels may make so many pairs.
MOST_PAIRS = 500_000
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
    return _Chain(layer, joints, count, budget_bytes, limits, epsilon).solution()


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
    distances: int = 0

    @cached_property
    def encoded(self) -> Encoded:
        return encoded(self.layer, list(dict.fromkeys([*self.joints.values(), *self.joints])))

    @cached_property
    def _start(self) -> Labelled:
        labelling = Labelling(self.encoded.start, self.limits, kept=self.kept)
        labelling.run(FEW_LABELS)
        return labelling.left()

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

    def solution(self) -> Solution:
        """Return the best plan that fits.

        Raises:
            BudgetError, InfeasibleError: none does.
        """
        # No plan is left that is looked for, or too many are.
        with suppress(InfeasibleError, TooLargeError):
            self._search()
        best = self.best or self._leanest()
        bound = best.total_us if self.bound_us >= with_margin(best.total_us, -3) else max(0.0, self.bound_us)
        statistics = self.limits.statistics() | {"distances": self.distances}
        return replace(best, lower_bound_us=bound, statistics=statistics)

    def _search(self) -> None:
        """Look for the best plan: among layers that prices bring up, then within some distance of the bound.

        Raises:
            InfeasibleError: nothing fits.
            TooLargeError: labels get too many.
        """
        start = self._start
        given = start.capped(self.budget_bytes - self.count * start.least_held())
        floor = given.least_transient
        room = self.budget_bytes - floor
        ring = Ring(self.layer, self.encoded, given, self.joints, self.count, self.limits)
        price, closed_us, plans = 0.0, inf, list[Plan]()
        with suppress(InfeasibleError):
            price, closed_us, plans = ring.climb(room)
            # Layers mix where their joints are alike, so each price is tried again with those of the best plans.
            self._mix(plans, floor, price)
            ranked = sorted(plans, key=lambda plan: plan.time_us + price * plan.memory.held_bytes)
            alike = {ring.at_joints(plan): plan for plan in reversed(ranked)}
            for plan in list(reversed(alike.values()))[:ALIKE]:
                plans += ring.climb(room, plan, price, inf if self.best is None else self.best.total_us)[2]
        bound_us, more = ring.bound_us(price, room, closed_us)
        self.bound_us = max(self.bound_us, bound_us)
        self._mix([*plans, *more], floor, price)
        for _ in range(FILLINGS):
            if self.best is None or self._is_proven or not plans:
                break
            before = self.best
            with suppress(InfeasibleError):
                self._fill(ring, plans, floor, price)
            if self.best is before:
                break
        least_us = priced(self.layer, self.encoded, given.at(price), self.limits).bound_us
        self._widen(given, floor, price, least_us)

    def _mix(self, plans: list[Plan], floor: int, price: float) -> None:
        """Look for the best plan among layers that are known."""
        with suppress(TooLargeError):
            slack = LOSS * sum(plan.time_us for plan in plans) / len(plans)
            joined = Joined(self.encoded, self.joints, self.count, floor, price)
            rows = joined.best(self._columns(plans), self.limits, self.budget_bytes, inf, slack, MOST_LABELS)
            if rows is not None:
                self._offer(self._written([plans[row].states for row in rows]))

    def _fill(self, ring: Ring, plans: list[Plan], floor: int, price: float) -> None:
        """Spend on one layer what the best plan leaves of the budget, and mix again."""
        best = self.best
        assert best is not None
        closed = {tuple(sorted(plan.states.items())): plan for plan in plans}
        spare = self.budget_bytes - best.memory.total_bytes
        for i in range(self.count):
            states = {name: best.states[f"{i}:{name}"] for name in self.layer.variables}
            known = closed.get(tuple(sorted(states.items())))
            if known is not None:
                found = ring.filled(known.memory.total_bytes + spare, known)
                if found is not None:
                    plans.append(found)
                    self._mix(plans, floor, price)
                return

    def _columns(self, plans: list[Plan]) -> Labels:
        """Return known layers as labels, by the states of the ends."""
        network, kept = self.encoded.network, sorted(self.kept)
        codes = [[network.states[v].index(plan.states[network.names[v]]) for plan in plans] for v in kept]
        columns = np.array(codes, np.int32).reshape(len(kept), len(plans))
        time_us = np.array([plan.time_us for plan in plans])
        held, transient = (
            np.array(counts, np.int64)
            for counts in ([p.memory.held_bytes for p in plans], [p.memory.transient_bytes for p in plans])
        )
        return Labels(Table("layer", tuple(kept), columns, time_us), time_us, held, transient)

    def _widen(self, given: Labelled, floor: int, price: float, least_us: float) -> None:
        """Look for the best plan ever further from what independent layers cost.

        Raises:
            InfeasibleError: nothing fits.
            TooLargeError: labels get too many.
        """
        base_us = self.count * least_us - price * (self.budget_bytes - floor)
        self.bound_us = max(self.bound_us, base_us)
        dearest = sum(float(t.time_us.max() + price * t.held_bytes.max()) for t in given.tables.values())
        # Nearer than the bound that is known, there is nothing to learn.
        distance = max(FIRST_SHARE * (abs(least_us) + 1e-6), 1.01 * (self.bound_us - base_us))
        while not self._is_proven:
            if self.best is not None:
                distance = min(distance, with_margin(self.best.total_us) - base_us)
            self.distances += 1
            joined = Joined(self.encoded, self.joints, self.count, floor, price)
            slack = self.epsilon / 2 * self.bound_us / self.count
            with suppress(InfeasibleError):
                whole = self._labels(given, floor, price, least_us + distance)
                most = with_margin(self.count * least_us + distance)
                rows = joined.best(whole, self.limits, self.budget_bytes, most, slack, MOST_LABELS)
                if rows is not None:
                    self._offer(self._written([self.encoded.states(whole.codes(row)) for row in rows]))
            # What fits and is not among the labels takes more.
            reached = base_us + distance if self.best is None else min(base_us + distance, self.best.total_us)
            self.bound_us = max(self.bound_us, reached - joined.spent_us)
            if self.best is None and self.distances == PATIENCE:
                # It is one that fits, or nothing does.
                self._offer(self._leanest())
            if distance > self.count * dearest or (self.limits.over and self.best is not None):
                return
            if self.best is not None and base_us + distance >= self.best.total_us:
                return
            distance *= WIDER

    def _labels(self, given: Labelled, floor: int, price: float, most_us: float) -> Labels:
        """Return the labels of a layer by the states of its ends, of which none costs more.

        Raises:
            InfeasibleError: there is none.
            TooLargeError: there are too many.
        """
        most = with_margin(most_us)
        layer = given.shrunk(price, most, floor)
        labelling = Labelling(
            layer, self.limits, floor_bytes=floor, most_us=most, kept=self.kept, most_pairs=MOST_PAIRS
        )
        whole = labelling.eliminated(MOST_LABELS)
        if whole is None:
            raise TooLargeError(f"a layer has more than {MOST_LABELS:,.0f} labels in one table")
        return whole

    @property
    def _is_proven(self) -> bool:
        if self.best is None:
            return False
        return self.bound_us >= with_margin(self.best.total_us, -2) / (1 + self.epsilon)

    def _offer(self, plan: Solution) -> None:
        if self.best is None or plan.total_us < self.best.total_us:
            self.best = plan

    def _written(self, layers: Sequence[Mapping[str, str]]) -> Solution:
        total = fsum(self.layer.cost_us(states) for states in layers)
        states = {f"{i}:{name}": each[name] for i, each in enumerate(layers) for name in self.layer.variables}
        solution = Solution(states, total, 0.0, "budgeted_repeated")
        return replace(solution, memory=self.memory(solution))

    def _leanest(self) -> Solution:
        """Return the plan with the fewest bytes.

        Raises:
            BudgetError: it needs more than the budget.
            InfeasibleError: layers do not fit each other.
        """
        start = self._start
        tables = {p: replace(t, time_us=np.zeros(t.rows)) for p, t in start.at(1.0).tables.items()}
        tables = {p: t.costing(t.held_bytes.astype(np.float64)) for p, t in tables.items()}
        given = Labelled(start.names, start.state_counts, tables, 1.0)
        floor, least = given.least_transient, float(given.least_held())
        most = self.count * sum(int(t.held_bytes.max()) for t in tables.values())
        distance = float(given.levels[-1] - floor + given.unit_bytes)
        while True:
            joined = Joined(self.encoded, self.joints, self.count, floor, 1.0)
            with suppress(InfeasibleError):
                whole = self._labels(given, floor, 1.0, least + distance)
                rows = joined.best(whole, self.limits, inf, self.count * least + distance, 0.0, MOST_LABELS)
                if rows is not None:
                    found = self._written([self.encoded.states(whole.codes(row)) for row in rows])
                    # Whoever needs less in all holds no more than this.
                    beyond = found.memory.total_bytes - floor - self.count * least
                    if beyond <= distance:
                        break
                    distance = beyond
                    continue
            if distance > most:
                raise InfeasibleError(f"no {self.count} layers fit each other: no states of a joint are possible")
            distance *= WIDER
        needed = found.memory
        if needed.total_bytes > self.budget_bytes:
            raise BudgetError(
                f"no assignment of {self.count} layers fits in {self.budget_bytes:,} bytes; the least that one needs is"
                f" {needed.total_bytes:,} bytes, {needed.held_bytes:,} of them held and {needed.transient_bytes:,} for"
                " a while",
                needed.total_bytes,
            )
        return found
