"""Costs moved between tables until the sum of their cheapest rows is a tight bound, and rows above it are dropped."""

from collections.abc import Mapping, Sequence

import numpy as np

from autotuner.solvers.consistency import Consistent
from autotuner.solvers.tables import Table


def near_order(left: Consistent) -> list[int]:
    """Return the variables so that neighbours are near: breadth first, from the last one that a first walk reaches."""
    variables = list(left.readers)
    far = _walk(left.readers, left.tables, variables)[-1:]
    return _walk(left.readers, left.tables, far + variables)


def _walk(readers: Mapping[int, Sequence[int]], tables: Mapping[int, Table], starts: Sequence[int]) -> list[int]:
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
    pools = {v: np.zeros(len(left.domains[v])) for v in order}
    columns = {(place, v): table.column(v) for place, table in left.tables.items() for v in table.variables}
    first = {place: min((rank[v] for v in table.variables), default=0) for place, table in left.tables.items()}
    last = {place: max((rank[v] for v in table.variables), default=0) for place, table in left.tables.items()}
    for sweep in range(sweeps):
        forth = sweep % 2 == 0
        for v in order if forth else reversed(order):
            pool = pools[v]
            for place in left.readers[v]:
                column = columns[place, v]
                least = np.full(len(pool), np.inf)
                np.minimum.at(least, column, costs[place])
                least[~left.domains[v]] = 0.0
                costs[place] -= least[column]
                pool += least
            onward = [p for p in left.readers[v] if (last[p] > rank[v] if forth else first[p] < rank[v])]
            behind = [p for p in left.readers[v] if (first[p] < rank[v] if forth else last[p] > rank[v])]
            if onward:
                share = pool / max(len(onward), len(behind))
                for place in onward:
                    costs[place] += share[columns[place, v]]
                    pool -= share
    for v in order:
        place = left.readers[v][0]
        costs[place] += pools[v][columns[place, v]]
    tables = {place: table.costing(costs[place]) for place, table in left.tables.items()}
    return Consistent(left.names, tables, left.domains, left.readers)


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
    tables = {place: table.take(table.costs <= least[place] + spare) for place, table in left.tables.items()}
    return Consistent(left.names, tables, left.domains, left.readers).narrowed(domains)
