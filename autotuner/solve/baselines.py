"""Baselines: the paper's shortest path along the chain, each variable's cheapest state in turn, and the default.

The default of every operator is a kernel of its own, with every tensor as declared.
"""

from collections.abc import Mapping
from itertools import count

from autotuner.ir.graph import Graph
from autotuner.solve.arc_consistency import Consistent, arc_consistent, bound_us, consistent, first_assignment
from autotuner.solve.bucket_elimination import BucketElimination
from autotuner.solve.conditioning import cheapest
from autotuner.solve.limits import SolverLimits
from autotuner.solve.problem import Problem, Solution
from autotuner.solve.tables import Network, encode
from autotuner.space import Choice, Space

# A factor belongs to the path if it spans at most this many neighbours on the chain; longer ones are residual edges.
REACH = 3
# Wrong turns before half of the path's states are given up.
MOST_BACKTRACKS = 200


def shortest_path(problem: Problem) -> Solution:
    """Return an assignment that is best along the chain, and greedy beside it.

    Of the factors whose variables are all on the chain, those that span at most `REACH` neighbours are solved as a
    shortest path, exactly; residual edges are cut. The path's states are kept. Every other variable, in order of first
    appearance, takes the cheapest state that is still consistent. Where that leaves nothing, the last choice is undone;
    after `MOST_BACKTRACKS` of those, the rear half of the path's states are given up, and so on; at last, the cheapest
    assignment is not looked for, but any.

    Returns:
        A feasible assignment, seldom the best; `lower_bound_us` is the sum of each factor's cheapest row.

    Raises:
        InfeasibleError: no assignment satisfies every factor.

    Source:
        Ivanov et al., Data Movement Is All You Need (MLSys 2021), the selection of configurations.
    """
    network = encode(problem)
    left = arc_consistent(network)
    chain = [network.names.index(name) for name in dict.fromkeys(problem.chain)]
    path = _path(network, left, chain)
    order = list(dict.fromkeys([*chain, *map(network.names.index, problem.variables)]))
    codes = followed(network, left, order, path)
    states = network.named(codes)
    return Solution(states, problem.cost_us(states), bound_us(left.tables.values()), "shortest_path")


def _path(network: Network, left: Consistent, chain: list[int]) -> dict[int, int]:
    """Return the states of the best path along the chain, in its order; variables that no factor ties to it are out."""
    rank = {variable: place for place, variable in enumerate(chain)}
    near = {}
    for place, table in left.tables.items():
        ranks = [rank.get(variable, -1) for variable in table.variables]
        if ranks and min(ranks) >= 0 and max(ranks) - min(ranks) < REACH:
            near[place] = table
    consistently = consistent(network.names, near, network.state_counts)
    tables = consistently.tables.values()
    codes = cheapest(BucketElimination(network.names, network.state_counts, tables, SolverLimits())).plan.codes()
    return {variable: codes[variable] for variable in chain if variable in codes}


def followed(network: Network, left: Consistent, order: list[int], path: dict[int, int]) -> dict[int, int]:
    """Return an assignment with as much of the front of the path as a bounded search can keep."""
    for halvings in count():
        kept = dict(list(path.items())[: len(path) >> halvings])
        found = first_assignment(left, order, kept, MOST_BACKTRACKS)
        if found is not None:
            return {variable: int(found.states(variable)[0]) for variable in order}
        if not kept:
            break
    return _any(network, left)


def _any(network: Network, left: Consistent) -> dict[int, int]:
    """Return some assignment, found by elimination with every cost 0, where greedy search went wrong too often."""
    tables = [table.costing(table.costs * 0) for table in left.tables.values()]
    return cheapest(BucketElimination(network.names, network.state_counts, tables, SolverLimits())).plan.codes()


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
    left = arc_consistent(network)
    codes = followed(network, left, list(range(len(network.names))), {})
    states = network.named(codes)
    return Solution(states, problem.cost_us(states), bound_us(left.tables.values()), "greedy")


def default_us(space: Space, costs_us: Mapping[str, float]) -> float | None:
    """Return the least cost with every operator alone and every tensor as declared, or None where that is not known."""
    alone = alone_as_declared_us(space, costs_us)
    names = [operator.name for operator in space.graph.operators]
    return sum(alone[name] for name in names) if alone.keys() >= set(names) else None


def alone_as_declared_us(space: Space, costs_us: Mapping[str, float]) -> dict[str, float]:
    """Return the least cost of each operator alone with its tensors as declared; those without a time are left out."""
    return {name: costs_us[key] for name, key in alone_as_declared(space, costs_us).items()}


def alone_as_declared(space: Space, costs_us: Mapping[str, float]) -> dict[str, str]:
    """Return the key of the call that does so for each operator, the cheapest one."""
    found: dict[str, str] = {}
    for choice in space.choices:
        key = choice.call.key
        if key in costs_us and len(choice.cover.operators) == 1 and is_declared(space.graph, choice):
            (name,) = choice.cover.operators
            if name not in found or costs_us[key] < costs_us[found[name]]:
                found[name] = key
    return found


def is_declared(graph: Graph, choice: Choice) -> bool:
    """Say whether every tensor of a choice lies as the graph declares it."""
    return all(text.split(":")[0] == graph.tensors[name].axes for name, text in choice.by_tensor.items())
