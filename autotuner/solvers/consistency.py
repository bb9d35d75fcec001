"""What no whole assignment can use, found before any search: states and rows that some neighbour does not support."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotuner.errors import InfeasibleError
from autotuner.problem import Problem
from autotuner.solvers.tables import Costs, Integers, Network, Table, encode

Domain = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Consistent:
    """Tables without the rows that arc consistency rules out, and the states that are left of each variable.

    Args:
        names: of the variables, by number, for messages.
        tables: by place; of a whole problem, table i is factor i.
        domains: per variable, whether each of its states is left.
        readers: per variable, the places of the tables that name it.
    """

    names: Sequence[str]
    tables: dict[int, Table]
    domains: dict[int, Domain]
    readers: Mapping[int, Sequence[int]]

    def assigned(self, variable: int, state: int) -> "Consistent":
        """Return what is left when the variable takes this state.

        Raises:
            InfeasibleError: nothing is left of some table.
        """
        only = np.zeros_like(self.domains[variable])
        only[state] = True
        return self.narrowed({variable: only & self.domains[variable]})

    def narrowed(self, domains: Mapping[int, Domain]) -> "Consistent":
        """Return what is left when these variables keep only these of their states.

        Raises:
            InfeasibleError: nothing is left of some table.
        """
        touched = [place for variable in domains for place in self.readers[variable]]
        return _fixpoint(Consistent(self.names, dict(self.tables), self.domains | dict(domains), self.readers), touched)

    def states(self, variable: int) -> Integers:
        """Return the states that are left of the variable, by number."""
        return np.flatnonzero(self.domains[variable])

    def cheapest(self, variable: int) -> Costs:
        """Return, for each state, the sum over the variable's tables of the cheapest row that has it; inf if none."""
        total = np.zeros(len(self.domains[variable]))
        for place in self.readers[variable]:
            total += self.tables[place].cheapest(variable, len(total))
        return total


def consistent(names: Sequence[str], tables: Mapping[int, Table], state_counts: Sequence[int]) -> Consistent:
    """Return the tables without states and rows that cannot be part of any whole assignment.

    Raises:
        InfeasibleError: nothing is left of some table; the message names it.

    Cost:
        O(d * r) steps for a table of r rows over variables of d states in total; mostly a few looks per table.
    """
    readers: dict[int, list[int]] = {}
    for place, table in tables.items():
        for variable in table.variables:
            readers.setdefault(variable, []).append(place)
    domains = {variable: np.ones(state_counts[variable], np.bool_) for variable in readers}
    return _fixpoint(Consistent(names, dict(tables), domains, readers), tables)


def _fixpoint(given: Consistent, touched: Iterable[int]) -> Consistent:
    """Drop rows whose states are gone, and states that no row has, until nothing changes; `given` is written to."""
    tables, domains = given.tables, given.domains
    queue = dict.fromkeys(touched)
    while queue:
        place = next(iter(queue))
        del queue[place]
        table = tables[place]
        keep = np.ones(table.rows, np.bool_)
        for variable, column in zip(table.variables, table.columns, strict=True):
            keep &= domains[variable][column]
        if not keep.all():
            table = tables[place] = table.take(keep)
        if not table.rows:
            raise InfeasibleError(_emptied(given.names, table))
        for variable, column in zip(table.variables, table.columns, strict=True):
            present = np.zeros_like(domains[variable])
            present[column] = True
            if not np.array_equal(present, domains[variable]):
                # `present` lies within the domain: rows outside it went above.
                domains[variable] = present
                queue.update(dict.fromkeys(other for other in given.readers[variable] if other != place))
    return given


def _emptied(names: Sequence[str], table: Table) -> str:
    if not table.variables:
        return f"factor {table.name!r} has no rows, so no assignment is allowed: give it at least one"
    variables = ", ".join(repr(names[v]) for v in table.variables)
    return (
        f"factor {table.name!r} has no row left: whatever states it allows for {variables},"
        " the other factors of these variables forbid"
    )


def whole(network: Network) -> Consistent:
    """Return all of the network's tables, arc consistent."""
    return consistent(network.names, dict(enumerate(network.tables)), network.state_counts)


def independent_bound_us(problem: Problem) -> float:
    """Return the sum of each factor's cheapest row, of those that arc consistency leaves: no assignment costs less.

    Added in the order in which `Problem.cost_us` adds, so rounding cannot lift it above an assignment's total.

    Raises:
        InfeasibleError: nothing is left of some factor.
    """
    return bound_us(whole(encode(problem)).tables.values())


def bound_us(tables: Iterable[Table]) -> float:
    """Return the sum of each table's cheapest row."""
    total = 0.0
    for table in tables:
        total += float(table.costs.min())
    return total
