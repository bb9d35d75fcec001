"""What the best total through each state is at least: a bound for every state, in the time of a few sweeps."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

import numpy as np

from autotuner.solve.bounds import near_order, tightened
from autotuner.solve.consistency import bound_us, whole
from autotuner.solve.elimination import SWEEPS
from autotuner.solve.problem import Problem, State
from autotuner.solve.tables import encode


def least_through(problem: Problem) -> Mapping[str, Mapping[State, float]]:
    """Return what the best total through each state of each variable is at least, inf where no assignment has it.

    Costs are moved between tables until the sum of their cheapest rows is a tight bound; a state is as far above it as
    its own cheapest rows are. `min_marginals` returns the totals themselves, where there is the memory for it.

    Returns:
        variable -> state -> microseconds; never above what `min_marginals` returns, up to rounding.

    Raises:
        InfeasibleError: some table has no row that agrees with the others.

    Cost:
        O(r) steps for r rows.

    Source:
        Reduced costs; de Givry et al., Solving Max-SAT as weighted CSP (2003).
    """
    network = encode(problem)
    left = whole(network)
    left = tightened(left, near_order(left), SWEEPS)
    bound = bound_us(left.tables.values())
    least = {place: float(table.costs.min()) for place, table in left.tables.items()}
    found: dict[str, Mapping[State, float]] = {}
    for v, name in enumerate(network.names):
        own = left.cheapest(v) + (bound - sum(least[place] for place in left.readers[v]))
        own = np.where(left.domains[v], own, inf)
        found[name] = MappingProxyType(dict(zip(network.states[v], own.tolist(), strict=True)))
    return MappingProxyType(found)
