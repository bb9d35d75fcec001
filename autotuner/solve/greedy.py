"""Each variable for itself, as a baseline: what tuning operator by operator comes to."""

from autotuner.solve.consistency import bound_us, whole
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.shortest_path import followed
from autotuner.solve.tables import encode


def greedy(problem: Problem) -> Solution:
    """Return an assignment in which each variable, in order of their names, takes its cheapest state.

    Only states count that are consistent with what was taken before. In the problem of a space operators come first:
    each takes its fastest choice, and tensors then pay the conversions between them. Where that leaves nothing, the
    last choices are undone; after many of those, any assignment is taken.

    Returns:
        A feasible assignment, seldom the best; `lower_bound_us` is the sum of each factor's cheapest row.

    Raises:
        InfeasibleError: no assignment satisfies every factor.
    """
    network = encode(problem)
    left = whole(network)
    codes = followed(network, left, list(range(len(network.names))), {})
    states = network.named(codes)
    return Solution(states, problem.cost_us(states), bound_us(left.tables.values()), "greedy")
