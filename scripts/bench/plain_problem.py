"""Plain problems as relaxed problems of the tuner: each row with a cost of a factor of one variable is a call."""

from dataclasses import replace

from autotuner.solve import exact
from autotuner.solve.problem import Factor, Problem, Row
from autotuner.tuner.bounds import CheapestPlan
from autotuner.tuner.learned import Costs
from autotuner.tuner.relaxation import least_totals


class PlainProblem:
    """The assignments of a plain problem, in which each row with a cost of a factor of one variable is a call.

    `calls` has what they cost, by key: the variable and its state.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.calls = {
            f"{factor.variables[0]}: {row[0]}": cost
            for factor in problem.factors
            if len(factor.variables) == 1
            for row, cost in factor.table.items()
            if cost > 0
        }

    def solve(self, costs_us: Costs) -> CheapestPlan:
        """Return the cheapest assignment at these costs.

        Raises:
            InfeasibleError: there is none.
        """
        problem = Problem(tuple(self._priced(factor, costs_us) for factor in self._problem.factors))
        solution = exact(problem)
        used = {f"{name}: {state}" for name, state in solution.states.items()}

        def through_us(most_us: float) -> Costs:
            least = least_totals(problem, solution.lower_bound_us, most_us)
            found = {f"{name}: {state}": us for name, states in least.items() for state, us in states.items()}
            return {key: found[key] for key in costs_us}

        return CheapestPlan(solution.total_us, solution.lower_bound_us, frozenset(used & self.calls.keys()), through_us)

    def _priced(self, factor: Factor, costs_us: Costs) -> Factor:
        if len(factor.variables) > 1:
            return factor
        (name,) = factor.variables
        rows: dict[Row, float] = {
            (state,): costs_us.get(f"{name}: {state}", cost)
            for (state,), cost in factor.table.items()
            if cost == 0 or f"{name}: {state}" in costs_us
        }
        return replace(factor, table=rows, held_bytes={})
