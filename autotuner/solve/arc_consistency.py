"""Arc consistency: states and rows without support go; and a depth-first search that maintains it."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

import numpy as np
from numpy.typing import NDArray

from autotuner.checkpoint import checkpoint
from autotuner.errors import InfeasibleError
from autotuner.solve.tables import Costs, CostTable, Integers, Network

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
    tables: dict[int, CostTable]
    domains: dict[int, Domain]
    readers: Mapping[int, Sequence[int]]
    _cheapest: dict[int, Costs] = field(default_factory=dict)

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
        return self._reduced(self.tables, domains, {})

    def reduced(self, tables: Mapping[int, CostTable], domains: Mapping[int, Domain]) -> "Consistent":
        """Return what is left of tables of fewer rows when these variables keep only these of their states.

        Raises:
            InfeasibleError: nothing is left of some table.
        """
        shorter = (place for place, table in tables.items() if len(table.costs) < len(self.tables[place].costs))
        return self._reduced(tables, domains, dict.fromkeys(shorter))

    def _reduced(
        self, tables: Mapping[int, CostTable], domains: Mapping[int, Domain], touched: dict[int, None]
    ) -> "Consistent":
        for variable, domain in domains.items():
            known = self.domains[variable]
            if domain is not known and (domain != known).any():
                touched.update(dict.fromkeys(self.readers[variable]))
        return _fixpoint(Consistent(self.names, dict(tables), self.domains | dict(domains), self.readers), touched)

    def states(self, variable: int) -> Integers:
        """Return the states that are left of the variable, by number."""
        return np.flatnonzero(self.domains[variable])

    def cheapest(self, variable: int) -> Costs:
        """Return, for each state, the sum over the variable's tables of the cheapest row that has it; inf if none."""
        if variable not in self._cheapest:
            total = np.zeros(len(self.domains[variable]))
            for place in self.readers[variable]:
                total += self.tables[place].cheapest(variable, len(total))
            self._cheapest[variable] = total
        return self._cheapest[variable]


def consistent(names: Sequence[str], tables: Mapping[int, CostTable], state_counts: Sequence[int]) -> Consistent:
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
    whole: dict[int, bool] = {}
    waiting = set(touched)
    queue = deque(dict.fromkeys(touched))
    while queue:
        checkpoint()
        place = queue.popleft()
        waiting.remove(place)
        table = tables[place]
        keep: NDArray[np.bool_] | None = None
        for variable, column in zip(table.variables, table.columns, strict=True):
            if variable not in whole:
                whole[variable] = bool(domains[variable].all())
            if not whole[variable]:
                mask = domains[variable][column]
                keep = mask if keep is None else keep & mask
        if keep is not None and not keep.all():
            table = tables[place] = table.take(keep)
        if not table.rows:
            raise InfeasibleError(_emptied(given.names, table))
        for variable, column in zip(table.variables, table.columns, strict=True):
            present = np.zeros(len(domains[variable]), np.bool_)
            present[column] = True
            # `present` lies within the domain: rows outside it went above.
            if np.count_nonzero(present) < np.count_nonzero(domains[variable]):
                domains[variable], whole[variable] = present, False
                for other in given.readers[variable]:
                    if other != place and other not in waiting:
                        waiting.add(other)
                        queue.append(other)
    return given


def _emptied(names: Sequence[str], table: CostTable) -> str:
    if not table.variables:
        return f"factor {table.name!r} has no rows, so no assignment is allowed: give it at least one"
    variables = ", ".join(repr(names[v]) for v in table.variables)
    return (
        f"factor {table.name!r} has no row left: whatever states it allows for {variables},"
        " the other factors of these variables forbid"
    )


def arc_consistent(network: Network) -> Consistent:
    """Return all of the network's tables, arc consistent.

    Raises:
        InfeasibleError: nothing is left of some table; the message names a few that contradict each other.
    """
    tables = dict(enumerate(network.tables))
    try:
        return consistent(network.names, tables, network.state_counts)
    except InfeasibleError as error:
        places = _conflict(network)
        if len(places) < 2:
            raise
        scope = sorted({v for place in places for v in tables[place].variables})
        raise InfeasibleError(
            f"factors {_listed(tables[place].name for place in places)} contradict each other: no states of"
            f" {_listed(network.names[v] for v in scope)} satisfy all of them; without any one of them, some might"
        ) from error


def _conflict(network: Network) -> list[int]:
    """Return places of tables that arc consistency alone refutes, none of which it could do without.

    A table at a time is left out for good if what stays is still refuted; half of the rest at a time, before that.
    """
    places = list(range(len(network.tables)))
    size = len(places) // 2
    while size:
        start = 0
        while start < len(places):
            fewer = places[:start] + places[start + size :]
            if _refuted(network, fewer):
                places = fewer
            else:
                start += size
        size //= 2
    return places


def _refuted(network: Network, places: Sequence[int]) -> bool:
    try:
        consistent(network.names, {place: network.tables[place] for place in places}, network.state_counts)
    except InfeasibleError:
        return True
    return False


def _listed(names: Iterable[str], most: int = 12) -> str:
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - most} more" if len(quoted) > most else ""
    return ", ".join(quoted[:most]) + more


def bound_us(tables: Iterable[CostTable]) -> float:
    """Return the sum of each table's cheapest row."""
    return fsum(float(table.costs.min()) for table in tables)


def first_assignment(
    left: Consistent, order: Sequence[int], preferred: Mapping[int, int], most_backtracks: int
) -> Consistent | None:
    """Return what is left when each variable of `order` has one state, or None after too many backtracks.

    Each variable takes its preferred state, or else the one whose cheapest rows cost least in sum; where that leaves
    nothing of some table, the next one; where no state is left, the variable before takes its next one.

    Args:
        left: arc consistent tables; every variable of theirs is in `order`.
        order: which variable is assigned first, second ...
        preferred: states to try first.
        most_backtracks: states that may turn out wrong before the search ends without an answer.

    Raises:
        InfeasibleError: every way was tried.
    """
    assigned = 0
    reason = ""
    before: list[tuple[Consistent, list[int]]] = []
    untried = _ranked(left, order[0], preferred) if order else []
    backtracks = 0
    while assigned < len(order):
        variable = order[assigned]
        if not untried:
            if not before:
                raise InfeasibleError(f"every assignment breaks some factor; of the last one tried, {reason}")
            left, untried = before.pop()
            assigned -= 1
            continue
        state = untried.pop()
        try:
            narrowed = left if len(left.states(variable)) == 1 else left.assigned(variable, state)
        except InfeasibleError as error:
            reason = str(error)
            backtracks += 1
            if backtracks > most_backtracks:
                return None
            continue
        assigned += 1
        before.append((left, untried))
        left = narrowed
        if assigned < len(order):
            untried = _ranked(left, order[assigned], preferred)
    return left


def _ranked(left: Consistent, variable: int, preferred: Mapping[int, int]) -> list[int]:
    """Return the variable's states, the one to try first at the end."""
    states = left.states(variable)
    if len(states) == 1:
        return [int(states[0])]
    costs = left.cheapest(variable)[states]
    ranked = [int(states[place]) for place in np.argsort(costs, kind="stable")[::-1]]
    if (first := preferred.get(variable)) in ranked:
        ranked.remove(first)
        ranked.append(first)
    return ranked
