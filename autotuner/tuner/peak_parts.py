"""Parts of the plans that a search within a budget of memory looks at, and how a part is bounded and split."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np
from scipy.optimize import linprog  # type: ignore[import-untyped]

from autotuner.plan.memory_planner import StepMemory
from autotuner.solve.problem import Problem, Solution, State
from autotuner.solve.problem.formulate import Formulation
from autotuner.solve.problem.live_bytes import LiveBytes

# Weights of moments are whole: parts of one of these.
WHOLES = (1, 2, 3, 4, 6, 8, 16, 64, 256)


@dataclass(frozen=True, eq=False)
class PeakPlan:
    """A plan that was simulated.

    Args:
        needs: by the memory planner; None where the plan cannot be run.
        excess_bytes: by moment, how far the bound on what is live is above what may be.
    """

    formulation: Formulation
    solution: Solution
    needs: StepMemory | None
    excess_bytes: Mapping[str, int]

    @property
    def peak_bytes(self) -> float:
        return inf if self.needs is None else self.needs.peak_bytes


@dataclass(frozen=True, eq=False)
class Level:
    """A space's problem with those kernels alone whose workspaces are small enough."""

    formulation: Formulation
    live: LiveBytes


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the plans: those of some states of variables, whose largest workspace lies between two sizes.

    Args:
        bound_us: none of them that fits takes less.
        plans: found before; none of them fits.
        weights: of moments, with which the bound was found.
    """

    bound_us: float
    states: Mapping[str, frozenset[State]] = field(default_factory=dict)
    least_workspace: int = 0
    most_workspace: float = inf
    plans: tuple[PeakPlan, ...] = ()
    weights: Mapping[str, int] = field(default_factory=dict)


def cutting_weights(part: Part) -> Mapping[str, int] | None:
    """Return weights of moments at which no plan that was found fits, or None where there are none.

    Source:
        Karwan and Rardin, Some relationships between Lagrangian and surrogate duality in integer programming (1979).
    """
    plans = [plan.excess_bytes for plan in part.plans]
    moments = [moment for moment in plans[0] if any(excess[moment] > 0 for excess in plans)]
    if not all(any(excess[moment] > 0 for moment in moments) for excess in plans):
        return None
    excess = np.array([[float(plan[moment]) for moment in moments] for plan in plans])
    scaled = np.column_stack((-excess / max(1.0, float(np.abs(excess).max())), np.ones(len(plans))))
    costs = np.zeros(len(moments) + 1)
    costs[-1] = -1.0
    sums = np.ones((1, len(moments) + 1))
    sums[0, -1] = 0.0
    bounds = [*[(0.0, None)] * len(moments), (None, None)]
    found = linprog(costs, scaled, np.zeros(len(plans)), sums, [1.0], bounds)
    if not found.success:
        return None
    for whole in WHOLES:
        times = np.rint(found.x[:-1] * whole)
        if np.all(excess @ times > 0):
            return {moment: int(n) for moment, n in zip(moments, times, strict=True) if n}
    return None


def split_states(level: Level, part: Part) -> tuple[str, frozenset[State], frozenset[State]] | None:
    """Return a variable and two shares of its states, or None where one assignment is all that is left.

    One share holds the last plan's state and all that have as many bytes at its fullest moment, the other the leaner
    ones. Where there are none, it is the plan's state and all others.
    """
    plan = part.plans[-1]
    problem, states = level.formulation.problem, plan.solution.states
    left = _left(problem, part.states)
    moment = max(plan.excess_bytes, key=lambda each: (plan.excess_bytes[each], each))
    shares = [share for share in level.live.above(part.least_workspace).shares if moment in share.moments]
    variables = {factor.name: factor.variables for factor in problem.factors}
    tables = {factor.name: factor.table for factor in problem.factors}
    ways: list[tuple[int, str, frozenset[State]]] = []
    for share in shares:
        own = share.row_bytes.get(tuple(states[name] for name in variables[share.factor]), 0)
        for place, name in enumerate(variables[share.factor]) if own else ():
            rows = ((row[place], share.row_bytes.get(row, 0)) for row in tables[share.factor])
            leaner = frozenset(state for state, n in rows if n < own and state != states[name]) & left[name]
            if leaner:
                ways.append((own, name, leaner))
    if ways:
        _, name, leaner = max(ways, key=lambda way: (way[0], way[1].startswith("saved"), way[1]))
        return name, left[name] - leaner, leaner
    # Where kernels are fewer, an order between them may have no variable.
    name = next((each for each in sorted(states) if len(left.get(each, ())) > 1), "")
    if not name:
        return None
    return name, frozenset((states[name],)), left[name] - {states[name]}


def _left(problem: Problem, chosen: Mapping[str, frozenset[State]]) -> dict[str, frozenset[State]]:
    """Return the states of each variable that every factor has in some row, of those that were chosen."""
    left: dict[str, frozenset[State]] = dict(chosen)
    for factor in problem.factors:
        for place, name in enumerate(factor.variables):
            found = frozenset(row[place] for row in factor.table)
            left[name] = left[name] & found if name in left else found
    return left
