"""Alternatives to an optimum: for each variable, the best whole assignment with another state of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic
from types import MappingProxyType

import numpy as np

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.solve.arc_consistency import arc_consistent
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.conditioning import MOST_ROWS, cheapest, with_margin
from autotuner.solve.dominance import merged, undominated
from autotuner.solve.junction_tree import BestAssignments, JunctionTree
from autotuner.solve.limits import MEMORY_BYTES, SolverLimits, TooLargeError
from autotuner.solve.problem import Problem, Solution, State
from autotuner.solve.tables import Network, encode
from autotuner.solve.variable_splitting import split

# How far above the optimum all states are looked for at once, as shares of it, while that fits: on an encoder layer the
# first step finds half of the alternatives in the time of two solutions, the second most of the rest in that of eight.
NEAR = (0.003, 0.01)
# A tree that needs more takes longer than what is left for solutions one by one.
TREE_BYTES = 96 << 20
# Of states near the optimum, the cheapest so many are written out as whole assignments.
MOST_PLANS = 2_000


@dataclass(frozen=True)
class Alternatives:
    """Whole assignments beside a solution.

    Args:
        plans: variable -> state -> the cheapest assignment with that state, the optimum's own states left out. All that
            cost `complete_us` or less are there, and the cheapest of each variable as well. If the time was over first,
            that one's `lower_bound_us` lies below its total, or it is missing.
        least_us: variable -> a proven bound: no assignment with another state of it than the optimum's costs less; inf
            where there is none.
        complete_us: up to which total nothing is missing.
    """

    plans: Mapping[str, Mapping[State, Solution]]
    least_us: Mapping[str, float]
    complete_us: float

    def best(self, variable: str) -> tuple[State, Solution] | None:
        """Return the cheapest other state of a variable with its assignment; of equal ones the first by name."""
        plans = self.plans.get(variable, {})
        return min(plans.items(), key=lambda pair: (pair[1].total_us, pair[0]), default=None)


def alternatives(
    problem: Problem,
    solution: Solution,
    variables: Iterable[str] | None = None,
    *,
    most_us: float = inf,
    time_limit_s: float | None = None,
    memory_limit_bytes: float = MEMORY_BYTES,
) -> Alternatives:
    """Return, for each variable, the best that can be had with any other state of it, everything else chosen anew.

    What lies near the optimum is found for all states at once, by one pass up a tree and one down; what is dearer,
    variable after variable, by solving without the optimum's state. The problem is made ready once.

    Args:
        solution: optimal; of a dearer one, the other states are compared with a total that is not the least.
        variables: to look at; all where None.
        most_us: totals above it are not looked for.
        time_limit_s: when to stop; what is not known then has a bound.
        memory_limit_bytes: the most that the tables of a tree may need together, and one table of a solution.

    Raises:
        ProblemError: the solution lacks a variable, or a variable is unknown.

    Cost:
        That of `min_marginals` a little above the optimum, and of one `exact` per variable with no other state there.
    """
    ends_at = None if time_limit_s is None else monotonic() + time_limit_s
    problem.cost_us(solution.states)
    asked = tuple(dict.fromkeys(problem.variables if variables is None else variables))
    unknown = sorted(set(asked) - set(problem.variables))
    if unknown:
        raise ProblemError(f"the problem has no variables {', '.join(map(repr, unknown))}")
    search = _AlternativesSearch(problem, solution, asked, most_us, ends_at, memory_limit_bytes)
    for share in NEAR:
        if not search.near(solution.total_us * (1 + share)):
            break
    for name in asked:
        search.without(name)
    plans = {name: MappingProxyType(dict(sorted(of.items()))) for name, of in search.plans.items()}
    return Alternatives(MappingProxyType(plans), MappingProxyType(search.least_us), search.complete_us)


class _AlternativesSearch:
    """The plans and bounds found so far."""

    def __init__(
        self,
        problem: Problem,
        solution: Solution,
        asked: tuple[str, ...],
        most_us: float,
        ends_at: float | None,
        memory_bytes: float,
    ) -> None:
        self.plans: dict[str, dict[State, Solution]] = {name: {} for name in asked}
        self.least_us = dict.fromkeys(asked, solution.lower_bound_us)
        # Below the optimum nothing can be missing.
        self.complete_us = with_margin(min(solution.lower_bound_us, solution.total_us), -1)
        self._problem, self._solution, self._most_us = problem, solution, most_us
        self._ends_at, self._memory_bytes = ends_at, memory_bytes
        self._network: Network = encode(problem)
        self._number = {name: v for v, name in enumerate(self._network.names)}
        self._state = {name: self._network.states[v].index(solution.states[name]) for name, v in self._number.items()}
        # Of each variable, the cheapest known plan in which it has another state.
        self._reached_us = dict.fromkeys(asked, inf)
        self._common: BucketElimination | None = None
        kept = [self._number[name] for name in asked]
        parts = split(arc_consistent(self._network), self._network.state_counts)
        self._state_counts = parts.state_counts
        left = undominated(parts.left, parts.state_counts, kept)
        self._left, self._argmins = merged(left, parts.state_counts, kept)

    def near(self, most_us: float) -> bool:
        """Look for every other state up to a total; say whether it is worth to look further."""
        most_us = min(most_us, self._most_us)
        limits = self._limits(TREE_BYTES)
        if limits.over:
            return False
        try:
            tree = JunctionTree(self._left, self._state_counts, limits, with_margin(most_us))
        except TooLargeError:
            return False
        through = BestAssignments(tree)
        found = sorted(
            (float(total), name, int(state))
            for name in self.plans
            for of in [through.cheapest[self._number[name]]]
            for state in np.flatnonzero(of <= with_margin(most_us))
            for total in [of[state]]
            if state != self._state[name]
        )
        complete_us = most_us
        if len(found) > MOST_PLANS:
            complete_us = with_margin(found[MOST_PLANS][0], -1)
            found = [each for each in found if each[0] <= complete_us]
        if not found and complete_us <= self.complete_us:
            return False
        for total, name, state in found:
            if self._over:
                complete_us = with_margin(total, -1)
                break
            written = self._network.states[self._number[name]][state]
            if written not in self.plans[name]:
                self.plans[name][written] = self._written(through.codes(self._number[name], state), None)
        self.complete_us = max(self.complete_us, complete_us)
        for name, plans in self.plans.items():
            self.least_us[name] = min((plan.total_us for plan in plans.values()), default=self.complete_us)
        return self.complete_us == most_us < self._most_us

    def without(self, name: str) -> None:
        """Look for the best assignment without the optimum's state of a variable, if none is known yet."""
        if self.plans[name] or self.complete_us >= self._most_us:
            return
        if self._over:
            return
        try:
            start, v = self._start(), self._number[name]
            others = start.consistent().domains[v].copy()
            others[self._state[name]] = False
            start = start.narrowed({v: others})
            if self._most_us < inf:
                self.least_us[name] = max(self.least_us[name], self._most_us)
                start.tighten(with_margin(self._most_us))
            found = cheapest(start, self.complete_us, self._reached_us[name])
        except InfeasibleError:
            self.least_us[name] = self._most_us
            return
        plan = self._written(found.plan.codes(), found.bound_us)
        self.least_us[name] = max(plan.lower_bound_us, self.complete_us)
        for other, total in self._reached_us.items():
            if plan.states[other] != self._solution.states[other]:
                self._reached_us[other] = min(total, plan.total_us)
        if plan.total_us <= with_margin(self._most_us):
            self.plans[name][plan.states[name]] = plan

    def _start(self) -> BucketElimination:
        """Return what all variables without another state near the optimum have in common, which is made once."""
        if self._common is None:
            self._common = BucketElimination(
                self._left.names, self._state_counts, self._left.tables.values(), self._limits(), self._argmins
            )
            kept = {self._number[each] for each, plans in self.plans.items() if not plans}
            self._common.run(MOST_ROWS, kept)
        return self._common

    @property
    def _over(self) -> bool:
        return self._limits().over

    def _limits(self, most_bytes: float = inf) -> SolverLimits:
        return SolverLimits(min(self._memory_bytes, most_bytes), self._ends_at)

    def _written(self, codes: dict[int, int], bound_us: float | None) -> Solution:
        for argmin in reversed(self._argmins):
            codes[argmin.variable] = argmin.state(codes)
        states = self._network.named(codes)
        total = self._problem.cost_us(states)
        bound = total if bound_us is None else min(total, bound_us)
        return Solution(states, total, bound, "alternatives")
