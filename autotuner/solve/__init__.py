"""Problem -> Solution, by several ways: each knows tables of costs, and nothing of what they are the costs of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autotuner.solve.alternatives import Alternatives, alternatives
from autotuner.solve.baselines import greedy, shortest_path
from autotuner.solve.budgeted import budgeted
from autotuner.solve.exact import exact
from autotuner.solve.junction_tree import min_marginals
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.reduced_costs import least_through

__all__ = [
    "SOLVERS",
    "Alternatives",
    "Solver",
    "alternatives",
    "budgeted",
    "exact",
    "least_through",
    "min_marginals",
]


@dataclass(frozen=True)
class Solver:
    """A way to solve problems, called with one.

    Args:
        solve: returns a feasible solution, or raises InfeasibleError where there is none.
        exact: its solutions are proven to cost the least; otherwise it is a baseline.
    """

    solve: Callable[[Problem], Solution]
    exact: bool

    def __call__(self, problem: Problem) -> Solution:
        return self.solve(problem)


SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {
        "exact": Solver(exact, exact=True),
        "shortest_path": Solver(shortest_path, exact=False),
        "greedy": Solver(greedy, exact=False),
    }
)
