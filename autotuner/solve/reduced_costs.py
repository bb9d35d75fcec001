"""Reduced-cost bounds: costs moved between tables until the sum of their cheapest rows is a tight bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from autotuner.checkpoint import checkpoint
from autotuner.solve.arc_consistency import Consistent, arc_consistent, bound_us
from autotuner.solve.problem import Problem, State
from autotuner.solve.tables import Costs, CostTable, encode

# More sweeps lift the bound by less than the next elimination does; seen on layers of 80 operators.
SWEEPS = 8


def near_order(left: Consistent) -> list[int]:
    """Return the variables so that neighbours are near: breadth first, from the last one that a first walk reaches."""
    variables = list(left.readers)
    far = _walk(left.readers, left.tables, variables)[-1:]
    return _walk(left.readers, left.tables, far + variables)


def _walk(readers: Mapping[int, Sequence[int]], tables: Mapping[int, CostTable], starts: Sequence[int]) -> list[int]:
    reached: dict[int, None] = {}
    looked: set[int] = set()
    for start in starts:
        queue = [start] if start not in reached else []
        reached.setdefault(start)
        for variable in queue:
            for place in readers[variable]:
                if place in looked:
                    continue
                looked.add(place)
                for other in tables[place].variables:
                    if other not in reached:
                        reached[other] = None
                        queue.append(other)
    return list(reached)


def tightened(left: Consistent, order: Sequence[int], sweeps: int) -> Consistent:
    """Return the same problem with costs moved between tables so that the sum of their cheapest rows rises.

    A sweep goes over the variables forth, the next one back. At each variable, what every table's rows cost at least
    with a state is taken out, summed, and shared among the tables that reach further along the way.

    Source:
        Kolmogorov, A new look at reweighted message passing (2015), with single variables as separators.
    """
    rank = {variable: place for place, variable in enumerate(order)}
    costs = {place: table.costs.copy() for place, table in left.tables.items()}
    first = {place: min((rank[v] for v in table.variables), default=0) for place, table in left.tables.items()}
    last = {place: max((rank[v] for v in table.variables), default=0) for place, table in left.tables.items()}
    shares: list[_Shares] = []
    for v in order:
        checkpoint()
        # Only states that are left are numbered, so that each has a row; indices of this width are quickest.
        number = np.cumsum(left.domains[v], dtype=np.intp) - 1
        places = left.readers[v]
        columns = [number[left.tables[place].column(v)] for place in places]
        onward = [last[place] > rank[v] for place in places]
        behind = [first[place] < rank[v] for place in places]
        count = max(sum(onward), sum(behind))
        pool = np.zeros(int(left.domains[v].sum()))
        shares.append(_Shares([costs[place] for place in places], columns, onward, behind, count, pool))
    for sweep in range(sweeps):
        forth = sweep % 2 == 0
        for each in shares if forth else reversed(shares):
            checkpoint()
            each.share(forth)
    for each in shares:
        each.costs[0] += each.pool[each.columns[0]]
    tables = {place: table.costing(costs[place]) for place, table in left.tables.items()}
    return Consistent(left.names, tables, left.domains, left.readers)


@dataclass(eq=False, slots=True)
class _Shares:
    """A variable's tables in a sweep: their costs, which are written to, and the variable's state in each row.

    Args:
        onward, behind: which tables have a later variable, an earlier one.
        count: among how many tables a state's costs are shared.
        pool: costs of each state that no table has at the moment.
    """

    costs: list[Costs]
    columns: list[NDArray[np.intp]]
    onward: list[bool]
    behind: list[bool]
    count: int
    pool: Costs

    def share(self, forth: bool) -> None:
        """Take out what each table's rows cost at least with a state, and share it among those further on."""
        pool, leasts = self.pool, []
        for costs, column in zip(self.costs, self.columns, strict=True):
            least = np.empty(len(pool))
            least.fill(np.inf)
            np.minimum.at(least, column, costs)
            pool += least
            leasts.append(least)
        further = self.onward if forth else self.behind
        shared = sum(further)
        share = pool / self.count if shared else pool
        if shared:
            pool -= share * shared
        for costs, column, least, gets in zip(self.costs, self.columns, leasts, further, strict=True):
            costs += ((share - least) if gets else -least)[column]


def pruned(left: Consistent, spare: float) -> Consistent:
    """Return what is left without states and rows that alone cost more than there is to spare.

    Args:
        left: arc consistent tables.
        spare: how far a total may lie above the sum of the tables' cheapest rows.

    Raises:
        InfeasibleError: nothing is left of some table.
    """
    least = {place: float(table.costs.min()) for place, table in left.tables.items()}
    domains = {
        v: domain & (left.cheapest(v) <= sum(least[place] for place in left.readers[v]) + spare)
        for v, domain in left.domains.items()
    }
    tables = {}
    for place, table in left.tables.items():
        kept = table.costs <= least[place] + spare
        tables[place] = table if kept.all() else table.take(kept)
    return left.reduced(tables, domains)


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
    left = arc_consistent(network)
    left = tightened(left, near_order(left), SWEEPS)
    bound = bound_us(left.tables.values())
    least = {place: float(table.costs.min()) for place, table in left.tables.items()}
    found: dict[str, Mapping[State, float]] = {}
    for v, name in enumerate(network.names):
        own = left.cheapest(v) + (bound - sum(least[place] for place in left.readers[v]))
        own = np.where(left.domains[v], own, inf)
        found[name] = MappingProxyType(dict(zip(network.states[v], own.tolist(), strict=True)))
    return MappingProxyType(found)
