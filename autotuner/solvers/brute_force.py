"""Exhaustive search, in plain dictionaries: the oracle of the other solvers, so it shares none of their code."""

from math import prod

from autotuner.errors import InfeasibleError, ProblemError
from autotuner.problem import Problem, Solution, State

MOST_ASSIGNMENTS = 1_000_000


def brute_force(problem: Problem) -> Solution:
    """Return the assignment with the least total cost, by trying all of them, depth first.

    A branch ends where its cost so far reaches that of the best assignment: no cost is negative. Of equally cheap
    assignments the first is returned: by the state of the first variable by name, then by that of the second ...

    Raises:
        InfeasibleError: no assignment satisfies every factor.
        ProblemError: more than `MOST_ASSIGNMENTS` would have to be looked at.
    """
    variables = sorted(problem.variables)
    states = [_states(problem, name) for name in variables]
    count = prod(map(len, states))
    if count > MOST_ASSIGNMENTS:
        raise ProblemError(
            f"{len(variables)} variables with {', '.join(str(len(each)) for each in states)} states make {count:,}"
            f" assignments; exhaustive search takes at most {MOST_ASSIGNMENTS:,}: use another solver"
        )
    place = {name: number for number, name in enumerate(variables)}
    # A factor is looked up as soon as the last of its variables has a state.
    due: list[list[tuple[tuple[int, ...], dict[tuple[State, ...], float]]]] = [[] for _ in range(len(variables) + 1)]
    for factor in sorted(problem.factors, key=lambda factor: factor.name):
        places = tuple(place[name] for name in factor.variables)
        due[max(places, default=-1) + 1].append((places, dict(factor.table)))

    best: tuple[State, ...] | None = None
    best_us = float("inf")
    branches: list[tuple[tuple[State, ...], float]] = [((), 0.0)]
    while branches:
        chosen, cost = branches.pop()
        for places, table in due[len(chosen)]:
            cost += table.get(tuple(chosen[p] for p in places), float("inf"))
        if cost >= best_us:
            continue
        if len(chosen) == len(variables):
            best, best_us = chosen, cost
            continue
        branches.extend(((*chosen, state), cost) for state in reversed(states[len(chosen)]))
    if best is None:
        raise InfeasibleError(f"none of {count:,} assignments satisfies all of {len(problem.factors)} factors")
    answer = dict(zip(variables, best, strict=True))
    total = problem.cost_us(answer)
    return Solution(answer, total, total, "brute_force")


def _states(problem: Problem, name: str) -> list[State]:
    """Return the states of the variable that every factor which names it has in some row, sorted."""
    each = [
        {row[factor.variables.index(name)] for row in factor.table}
        for factor in problem.factors
        if name in factor.variables
    ]
    return sorted(set.intersection(*each))
