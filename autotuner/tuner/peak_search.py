"""Search for the fastest plan whose simulated peak of memory fits a budget, by branch and bound.

Bounds on what is live at each moment (`autotuner.solve.problem.live_bytes`) are linear in a plan's rows. A weighted sum
of moments within the weighted sum of what they may need is one budget, which `budgeted` solves: its time is a bound for
every plan that fits. Weights are chosen so that no plan that was found, and does not fit, satisfies the sum. Where no
weights do so, plans are split in two: by the largest workspace of a kernel, or by the states of a variable.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from math import exp, inf
from time import monotonic

from autotuner.errors import BudgetError, ConfigurationError, InfeasibleError
from autotuner.ir.records import Measurement
from autotuner.plan.memory_planner import StepMemory
from autotuner.solve import budgeted, exact
from autotuner.solve.problem import Factor, Problem, Solution
from autotuner.solve.problem.formulate import Formulation, SpaceProblem
from autotuner.solve.problem.live_bytes import live_bytes
from autotuner.solve.problem.ordering import CircleError
from autotuner.tuner.peak_parts import Level, Part, PeakPlan, cutting_weights, split_states

# Problems that are solved for one budget: so many rows in all, and at least and at most so many problems.
ROWS = 1_000_000
CALLS = (14, 1_000)
# One problem may take so long, or longer where it has more rows than so many for each second.
SOLVE_LIMIT_S, ROWS_PER_S = 3.0, 100_000
# Where the time is over before a plan is known that fits, each further problem may take so long.
PATIENCE_S = 1.0
# Of a large problem, a plan proven to be so near to the fastest is good enough: the rest takes most of the time.
EPSILON = 1e-3
EXACT_ROWS = 2_000
# Within a gap of this share, so many problems in a row end the search that bring no faster plan and no bound that is
# higher by a share of the gap.
NEAR, STALLED, LIFT = 0.02, 10, 0.02
# So many prices of bytes are tried to find plans of a large problem that fit. The first one makes all bytes of the
# fullest moment cost this share of the time. Prices are multiplied by `STEEP` until a plan fits, then by the first of
# `GENTLE` where one does not, and else by the second.
STEPS, FIRST, STEEP, GENTLE = 14, 0.2, 2.0, (1.3, 0.83)
# A moment's weight falls by e where it was by this share less full than the fullest one. Those that are nearly as full
# share a part of all weight. Once a plan fits, so many prices in a row without a faster one are enough.
SHARP, FULL, SPREAD, ENOUGH = 0.2, 0.8, 0.02, 5


class PeakSearch:
    """The search within one budget, and then within others: what was found stays known.

    Args:
        unpriced: the space's problem.
        known: what was measured, by call key.
        simulate: the memory of a solution.
        ends_at: when to take the best plan that fits, by `time.monotonic`.
    """

    def __init__(
        self,
        unpriced: SpaceProblem,
        known: Mapping[str, Measurement],
        simulate: Callable[[Formulation, Solution], StepMemory],
        ends_at: float = inf,
    ) -> None:
        self._unpriced, self._simulate, self._ends_at = unpriced, simulate, ends_at
        self._costs_us = {key: m.median_us for key, m in known.items() if m.median_us is not None}
        self._workspaces = {key: known[key].workspace_bytes for key in self._costs_us}
        self._state_workspaces = unpriced.least_of(self._workspaces)
        self._sizes = sorted({0, *self._workspaces.values()})
        self._levels: dict[float, Level] = {}
        self._circles: list[tuple[tuple[str, ...], ...]] = []
        self._plans: list[PeakPlan] = []
        self._numbers = count()
        self._start(0, 0)

    def run(self, budget_bytes: int, *, any_plan: bool = False) -> None:
        """Search until the best plan is proven, or the calls or the time are over.

        Args:
            budget_bytes: of the peak.
            any_plan: stop at the first plan that fits.

        Raises:
            InfeasibleError: there is no plan, whatever its peak.
        """
        self._start(budget_bytes, self._most_calls)
        part = Part(0.0)
        plans = [replace(plan, excess_bytes=self._excess(plan, part)) for plan in self._plans]
        for plan in plans:
            self._offer(plan)
        part = replace(part, plans=tuple(plan for plan in plans if plan.peak_bytes > budget_bytes))
        self._push(part)
        while self._queue and not self.is_over and not (any_plan and self.best is not None):
            _, _, part = heapq.heappop(self._queue)
            if part.bound_us >= self._cutoff_us:
                self._settle(part.bound_us)
            else:
                self._process(part)

    def look_for_leaner(self) -> None:
        """Look for lean plans where bounds have told that none fits before any was looked for."""
        self._walk(Part(0.0))
        needs = self.leanest.needs
        smaller = [size for size in self._sizes if needs is not None and size < needs.workspace_bytes]
        if smaller:
            self._walk(Part(0.0, most_workspace=smaller[-1]))

    def _start(self, budget_bytes: int, calls: int) -> None:
        self.budget_bytes, self._calls_left = budget_bytes, calls
        self._queue: list[tuple[float, int, Part]] = []
        self._settled_us = inf
        self._reached_us, self._stalled = (0.0, inf), 0
        self._walked: set[float] = set()
        self.best: PeakPlan | None = None

    @property
    def leanest(self) -> PeakPlan:
        """The plan of the least peak that was found."""
        return min(self._plans, key=lambda plan: plan.peak_bytes)

    @property
    def is_proven(self) -> bool:
        """True where nothing is left to be searched."""
        return not self._queue and self._settled_us >= self._cutoff_us

    @property
    def bound_us(self) -> float:
        """A bound on the time of every plan that fits; infinite where none does."""
        best_us = inf if self.best is None else self.best.solution.total_us
        return min(best_us, self._settled_us, *(bound for bound, _, _ in self._queue))

    @property
    def is_over(self) -> bool:
        if self.best is None:
            return self._calls_left <= 0 or (self.is_late and bool(self._walked))
        is_near = self.best.solution.total_us <= self._reached_us[0] * (1 + NEAR) and not self.is_small
        return self._calls_left <= 0 or self.is_late or (is_near and self._stalled >= STALLED)

    @property
    def is_late(self) -> bool:
        """True once the time is over."""
        return monotonic() >= self._ends_at

    @property
    def is_small(self) -> bool:
        """True for problems that are searched until nothing is left."""
        return self._rows <= EXACT_ROWS

    @property
    def _most_calls(self) -> int:
        least, most = CALLS
        return max(least, min(most, ROWS // self._rows))

    @property
    def _rows(self) -> int:
        return sum(len(factor.table) for factor in self._level(inf).formulation.problem.factors)

    @property
    def _epsilon(self) -> float:
        return 0.0 if self.is_small else EPSILON

    @property
    def _cutoff_us(self) -> float:
        return inf if self.best is None else self.best.solution.total_us / (1 + self._epsilon) * (1 - 1e-9)

    def _settle(self, bound_us: float) -> None:
        self._settled_us = min(self._settled_us, bound_us)

    def _push(self, part: Part) -> None:
        heapq.heappush(self._queue, (part.bound_us, next(self._numbers), part))

    def _process(self, part: Part) -> None:
        """Settle a part, or push what it is split into."""
        if part.plans:  # otherwise the fastest plan may fit
            self._walk(part)
        weights = cutting_weights(part) if part.plans else part.weights
        while weights is not None and not self._is_wide(part):
            self._note(min(part.bound_us, self.bound_us))
            if self.is_over or (self._queue and self._queue[0][0] < part.bound_us):
                self._push(part)
                return
            try:
                found = self._solved(part, weights)
            except BudgetError as error:
                if not error.is_proven:
                    self._settle(part.bound_us)
                return
            except InfeasibleError:
                if not self._plans:
                    raise
                return
            if found is None:  # a circle of covers, which is known now
                continue
            part = replace(part, bound_us=max(part.bound_us, found.solution.lower_bound_us))
            if found.peak_bytes <= self.budget_bytes or part.bound_us >= self._cutoff_us:
                self._settle(part.bound_us)
                return
            part = replace(part, plans=(*part.plans, found), weights=weights)
            weights = cutting_weights(part)
        for half in self._halves(part):
            self._walk(half)
            self._push(half)

    def _note(self, bound_us: float) -> None:
        """Note how far the search is before it solves a problem."""
        best_us = inf if self.best is None else self.best.solution.total_us
        reached_us, known_us = self._reached_us
        if best_us < known_us or bound_us > reached_us + LIFT * (best_us - reached_us):
            self._reached_us, self._stalled = (bound_us, best_us), 0
        else:
            self._stalled += 1

    def _is_wide(self, part: Part) -> bool:
        """Tell whether the last plan's workspace is larger than the bounds on its part count for each plan."""
        needs = part.plans[-1].needs if part.plans else None
        return needs is not None and needs.workspace_bytes > part.least_workspace

    def _walk(self, part: Part) -> None:
        """Look for plans that fit with prices for the bytes of each moment, higher where a plan was fuller.

        Prices rise until a plan fits, and fall then. A price takes a fifth of the time of a budget, and gives no bound.

        Source:
            Arora, Hazan and Kale, The multiplicative weights update method (2012).
        """
        if part.most_workspace in self._walked or part.bound_us >= self._cutoff_us:
            return
        self._walked.add(part.most_workspace)
        try:
            level = self._level(part.most_workspace)
        except InfeasibleError:
            return
        problem, live = level.formulation.problem, replace(level.live, workspaces=())
        weights, price = dict.fromkeys(live.given_bytes, 1.0), 0.0
        rise, fall = STEEP, 1.0
        stalled = 0
        for _ in range(STEPS):
            if stalled >= ENOUGH or (self.is_late and self.best is not None):
                return
            priced = live.priced(problem, {moment: price * weight for moment, weight in weights.items()})
            try:
                states = exact(priced, time_limit_s=self._limit_s).states
            except InfeasibleError:
                return
            found = self._simulated(level, Solution(states, problem.cost_us(states), 0.0, "exact"), part)
            if found is None or found.needs is None or (not price and found.solution.total_us >= self._cutoff_us):
                return
            loads = live.of(problem, states)
            most = max(1, *loads.values())
            weights = {moment: weights[moment] * exp((n - most) / (SHARP * most)) for moment, n in loads.items()}
            whole, full = sum(weights.values()), [moment for moment, n in loads.items() if n > FULL * most]
            weights = {
                moment: (1 - SPREAD) * weight / whole + SPREAD * (moment in full) / len(full)
                for moment, weight in weights.items()
            }
            if found.peak_bytes <= self.budget_bytes:
                rise, fall = GENTLE
            stalled = 0 if found is self.best or rise == STEEP else stalled + 1
            price = (
                price * (fall if found.peak_bytes <= self.budget_bytes else rise)
                or FIRST * found.solution.total_us / most
            )

    # One problem.

    def _level(self, most_workspace: float) -> Level:
        """Return the problem of kernels whose workspaces are so large at most.

        Raises:
            InfeasibleError: some operator has no such kernel.
        """
        if most_workspace not in self._levels:
            costs_us = {key: us for key, us in self._costs_us.items() if self._workspaces[key] <= most_workspace}
            formulation = self._unpriced.priced(costs_us)
            for covers in self._circles:
                formulation = formulation.without(covers)
            live = live_bytes(
                formulation.problem, formulation.offered, formulation.structure.lies, self._state_workspaces
            )
            self._levels[most_workspace] = Level(formulation, live)
        return self._levels[most_workspace]

    def _may_need(self, part: Part) -> int:
        """Return what may be live at a moment, beside what the caller is handed."""
        base_bytes = self._level(part.most_workspace).formulation.base_bytes
        return self.budget_bytes - base_bytes - part.least_workspace

    def _solved(self, part: Part, weights: Mapping[str, int]) -> PeakPlan | None:
        """Return the fastest plan of a part whose weighted bytes fit; None where it cannot be ordered.

        Args:
            weights: by moment; where there are none, nothing has to fit.

        Raises:
            BudgetError: none fits, or none was found in time.
            InfeasibleError: there is no plan, whatever its bytes.
        """
        level = self._level(part.most_workspace)
        problem = level.formulation.problem
        chosen = [
            Factor(f"of {name}", (name,), {(state,): 0.0 for state in states}) for name, states in part.states.items()
        ]
        self._calls_left -= 1
        if weights:
            live = level.live.above(part.least_workspace)
            weighed = live.weighed(problem, weights)
            may_need = self._may_need(part)
            budget = sum(times * (may_need - live.given_bytes[moment]) for moment, times in weights.items())
            if budget < 0:
                raise BudgetError("what is live at some moments is more than fits", 0)
            given = Problem((*weighed.factors, *chosen), problem.chain)
            solution = budgeted(given, budget, time_limit_s=self._limit_s, epsilon=self._epsilon)
        else:
            left_s = max(PATIENCE_S, self._ends_at - monotonic())
            given = Problem((*problem.factors, *chosen), problem.chain)
            solution = exact(given, time_limit_s=None if left_s == inf else left_s)
        return self._simulated(level, solution, part)

    def _simulated(self, level: Level, solution: Solution, part: Part) -> PeakPlan | None:
        """Return a plan with what it needs, and note it; None where its covers cannot be ordered."""
        try:
            needs = self._simulate(level.formulation, solution)
        except CircleError as error:
            self._circles.append(error.covers)
            self._levels = {
                most: replace(each, formulation=each.formulation.without(error.covers))
                for most, each in self._levels.items()
            }
            return None
        except ConfigurationError:
            if not self._plans:
                raise
            needs = None
        plan = PeakPlan(level.formulation, solution, needs, {})
        plan = replace(plan, excess_bytes=self._excess(plan, part))
        self._plans.append(plan)
        self._offer(plan)
        return plan

    @property
    def _limit_s(self) -> float:
        return min(max(SOLVE_LIMIT_S, self._rows / ROWS_PER_S), max(PATIENCE_S, self._ends_at - monotonic()))

    def _offer(self, plan: PeakPlan) -> None:
        fits = plan.peak_bytes <= self.budget_bytes
        if fits and (self.best is None or plan.solution.total_us < self.best.solution.total_us):
            self.best = plan

    def _excess(self, plan: PeakPlan, part: Part) -> Mapping[str, int]:
        level, may_need = self._level(part.most_workspace), self._may_need(part)
        loads = level.live.above(part.least_workspace).of(level.formulation.problem, plan.solution.states)
        return {moment: n - may_need for moment, n in loads.items()}

    # What is next.

    def _halves(self, part: Part) -> Iterator[Part]:
        """Yield the part twice, as two parts without a plan in common."""
        plan = part.plans[-1]
        if self._is_wide(part):
            assert plan.needs is not None
            size = plan.needs.workspace_bytes
            yield self._with_plans(replace(part, most_workspace=max(each for each in self._sizes if each < size)))
            yield self._with_plans(replace(part, least_workspace=size))
            return
        split = split_states(self._level(part.most_workspace), part)
        if split is None:
            return
        name, states, others = split
        for half in (states, others):
            yield self._with_plans(replace(part, states={**part.states, name: half}))

    def _with_plans(self, part: Part) -> Part:
        """Return a part with the plans that are of it."""
        try:
            self._level(part.most_workspace)
        except InfeasibleError:
            return replace(part, plans=())
        own = [
            replace(plan, excess_bytes=self._excess(plan, part))
            for plan in part.plans
            if all(plan.solution.states.get(name) in states for name, states in part.states.items())
            and plan.needs is not None
            and part.least_workspace <= plan.needs.workspace_bytes <= part.most_workspace
        ]
        return replace(part, plans=tuple(own))
