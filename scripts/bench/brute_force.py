"""Exhaustive search, in plain dictionaries: the oracle of the other solvers, so it shares none of their code."""

from math import prod

from autotuner.errors import BudgetError, InfeasibleError, ProblemError
from autotuner.solve.problem import Factor, Problem, Solution, State

MOST_ASSIGNMENTS = 1_000_000


def brute_force(problem: Problem, budget_bytes: int | None = None) -> Solution:
    """Return the assignment with the least total cost, of those within a budget, by trying all of them, depth first.

    A branch ends where its cost so far reaches that of the best assignment, or its bytes exceed the budget: none is
    negative. Of equally cheap assignments the first is returned: by the state of the first variable by name, then by
    that of the second ...

    Raises:
        BudgetError: assignments satisfy every factor, but each holds more bytes.
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
    due: list[list[tuple[tuple[int, ...], Factor]]] = [[] for _ in range(len(variables) + 1)]
    for factor in sorted(problem.factors, key=lambda factor: factor.name):
        places = tuple(place[name] for name in factor.variables)
        due[max(places, default=-1) + 1].append((places, factor))

    def search(by_bytes: bool, most_bytes: float) -> tuple[State, ...] | None:
        best: tuple[State, ...] | None = None
        best_value = float("inf")
        branches: list[tuple[tuple[State, ...], float, int]] = [((), 0.0, 0)]
        while branches:
            chosen, cost, held = branches.pop()
            for places, factor in due[len(chosen)]:
                row = tuple(chosen[p] for p in places)
                cost += factor.table.get(row, float("inf"))
                held += factor.held_bytes.get(row, 0)
            value = held if by_bytes and cost < float("inf") else cost
            if value >= best_value or held > most_bytes:
                continue
            if len(chosen) == len(variables):
                best, best_value = chosen, value
                continue
            branches.extend(((*chosen, state), cost, held) for state in reversed(states[len(chosen)]))
        return best

    best = search(False, float("inf") if budget_bytes is None else budget_bytes)
    if best is None and budget_bytes is not None:
        leanest = search(True, float("inf"))
        if leanest is not None:
            least = problem.held_bytes(dict(zip(variables, leanest, strict=True)))
            raise BudgetError(f"none of {count:,} assignments holds less than {least:,} bytes", least)
    if best is None:
        raise InfeasibleError(f"none of {count:,} assignments satisfies all of {len(problem.factors)} factors")
    answer = dict(zip(variables, best, strict=True))
    total = problem.cost_us(answer)
    # The held bytes are told where a budget was given, as by the other solvers.
    held_bytes = 0 if budget_bytes is None else problem.held_bytes(answer)
    return Solution(answer, total, total, "brute_force", held_bytes=held_bytes)


def _states(problem: Problem, name: str) -> list[State]:
    """Return the states of the variable that every factor which names it has in some row, sorted."""
    each = [
        {row[factor.variables.index(name)] for row in factor.table}
        for factor in problem.factors
        if name in factor.variables
    ]
    return sorted(set.intersection(*each))
