"""Dominance: states that another one always replaces, and variables that are forced to be equal."""

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from autotuner.checkpoint import checkpoint
from autotuner.solve.arc_consistency import Consistent, Domain, consistent
from autotuner.solve.bucket_elimination import ArgminTable
from autotuner.solve.tables import Codes, Costs, CostTable, hashes, keys


def merged(
    left: Consistent, state_counts: Sequence[int], kept: Collection[int] = ()
) -> tuple[Consistent, list[ArgminTable]]:
    """Return the tables with one variable in place of two that are forced to be equal, and how to read the other.

    Two variables are equal, up to the names of their states, where a table of both has each state of either in one row.

    Args:
        kept: variables that stay.
    """
    tables, argmins = dict(left.tables), list[ArgminTable]()
    readers = {v: dict.fromkeys(places) for v, places in left.readers.items()}
    for place in sorted(tables):
        table = tables[place]
        if len(table.variables) != 2 or not _is_equality(table, left):
            continue
        stays, gone = sorted(table.variables, key=lambda v: (v not in kept, v))
        if gone in kept:
            continue
        rest = table.without((gone,))
        argmins.append(ArgminTable(gone, rest.costing(np.zeros(rest.rows)), table.column(gone)))
        translation = np.zeros(state_counts[gone], np.int32)
        translation[table.column(gone)] = table.column(stays)
        tables[place] = rest
        del readers[gone][place]
        for other in readers.pop(gone):
            tables[other] = _renamed(tables[other], gone, stays, translation)
            readers[stays][other] = None
    return (consistent(left.names, tables, state_counts) if argmins else left), argmins


def _is_equality(table: CostTable, left: Consistent) -> bool:
    return all(
        table.rows == left.domains[variable].sum() == len(np.unique(column))
        for variable, column in zip(table.variables, table.columns, strict=True)
    )


def _renamed(table: CostTable, gone: int, kept: int, translation: Codes) -> CostTable:
    column = translation[table.column(gone)]
    if kept in table.variables:
        return table.take(column == table.column(kept)).without((gone,))
    place = table.variables.index(gone)
    columns = table.columns.copy()
    columns[place] = column
    return CostTable(table.name, (*table.variables[:place], kept, *table.variables[place + 1 :]), columns, table.costs)


def undominated(left: Consistent, state_counts: Sequence[int], kept: Collection[int] = ()) -> Consistent:
    """Return what is left without states that another state of their variable always replaces at no more cost.

    State s goes if some state t has the same rows, and what t costs more in one table at most is made up for in the
    others: the slower of two algorithms on the same forms, a conversion that no reader asks for. Of two that replace
    each other the first stays.

    Args:
        kept: variables that keep all of their states.

    Source:
        Goldstein, Efficient rotamer elimination (1994), for states that allow the same.
    """
    queue = dict.fromkeys(_with_twins(left, state_counts))
    while queue:
        variable = next(iter(queue))
        del queue[variable]
        if variable in kept:
            continue
        gone = _replaced(left, variable, state_counts)
        if not gone:
            continue
        domain: Domain = left.domains[variable].copy()
        domain[gone] = False
        before = left.domains
        left = left.narrowed({variable: domain})
        fewer = [v for v, states in left.domains.items() if states.sum() < before[v].sum()]
        near = {v: None for one in fewer for place in left.readers[one] for v in left.tables[place].variables}
        queue.update(near)
    return left


def _with_twins(left: Consistent, state_counts: Sequence[int]) -> list[int]:
    """Return the variables with states that seem to allow the same rows, by sums of hashes of them."""
    sums = {v: np.zeros(state_counts[v], np.uint64) for v in left.readers}
    for place, table in left.tables.items():
        for variable in table.variables if len(table.variables) > 1 else ():
            rest = table.without((variable,))
            key, _ = keys(rest.columns, [state_counts[v] for v in rest.variables], table.rows)
            np.add.at(sums[variable], table.column(variable), hashes(key, place))
    return [v for v, each in sums.items() if len(np.unique(each[left.domains[v]])) < left.domains[v].sum()]


def _replaced(left: Consistent, variable: int, state_counts: Sequence[int]) -> list[int]:
    """Return the states of the variable that another one replaces."""
    states = left.states(variable)
    if len(states) < 2:
        return []
    allowed: list[list[bytes]] = [[] for _ in states]
    costs: list[list[Costs]] = [[] for _ in states]
    for place in left.readers[variable]:
        table = left.tables[place]
        rest = table.without((variable,))
        key, _ = keys(rest.columns, [state_counts[v] for v in rest.variables], table.rows)
        column = table.column(variable)
        order = np.lexsort((key, column))
        ends = np.searchsorted(column[order], states, side="right").tolist()
        key, cost = key[order], table.costs[order]
        for number, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            allowed[number].append(key[start:end].tobytes())
            costs[number].append(cost[start:end])
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for number, rows in enumerate(allowed):
        alike.setdefault(tuple(rows), []).append(number)
    gone = []
    for group in alike.values():
        kept: list[int] = []
        for number in group:
            checkpoint()
            if any(_never_dearer(costs[other], costs[number]) for other in kept):
                gone.append(int(states[number]))
                continue
            worse = [other for other in kept if _never_dearer(costs[number], costs[other])]
            gone += [int(states[other]) for other in worse]
            kept = [other for other in kept if other not in worse] + [number]
    return gone


def _never_dearer(one: Sequence[Costs], other: Sequence[Costs]) -> bool:
    """Say whether the first state costs no more than the second, whatever the other variables do."""
    return sum(float((mine - theirs).max()) for mine, theirs in zip(one, other, strict=True)) <= 0
