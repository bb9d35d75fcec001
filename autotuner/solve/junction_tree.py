"""Junction tree: elimination that keeps its tables; two passes give the min-marginal of every state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import Consistent, arc_consistent, bound_us, consistent
from autotuner.solve.buckets import UNKNOWN, Buckets, Estimate
from autotuner.solve.conditioning import with_margin
from autotuner.solve.limits import MEMORY_BYTES, SolverLimits, TooLargeError
from autotuner.solve.problem import Problem, State
from autotuner.solve.reduced_costs import SWEEPS, near_order, pruned, tightened
from autotuner.solve.tables import Costs, CostTable, Integers, encode, join, keys, minimised
from autotuner.solve.variable_splitting import split

# Before a join of more rows than these, bounds drop what they can; one of so many times as many is put off.
MOST_ROWS = 5_000
JOINED = 16


@dataclass(frozen=True, eq=False, slots=True)
class Clique:
    """A variable that was eliminated.

    Args:
        joined: all tables that named it, those made by the cliques below among them.
        result: what was left of `joined` without it.
        below: places of the cliques whose results went into `joined`.
    """

    variable: int
    joined: CostTable
    result: CostTable
    below: tuple[int, ...]


class JunctionTree(Buckets[CostTable]):
    """All variables eliminated, one clique each, the last one eliminated at the root.

    Args:
        left: arc consistent tables.
        state_counts: number of states of each variable.
        limits: what all tables that are held may need together.
        most_us: rows that bounds show to be part of dearer assignments only are dropped on the way.

    Raises:
        InfeasibleError: some tables share no row.
        TooLargeError: the tables would need too much memory, or the time was over.

    Cost:
        O(n * f**w) steps and rows for n variables of f states, w of them beside one another at most; nothing is pruned.

    Source:
        Dechter, Bucket elimination (1999), section 5; Shafer and Shenoy, Probability propagation (1990).
    """

    def __init__(
        self,
        left: Consistent,
        state_counts: Sequence[int],
        limits: SolverLimits,
        most_us: float = np.inf,
    ) -> None:
        super().__init__(state_counts)
        self.names = left.names
        self.limits = limits
        self.cliques: list[Clique] = []
        self.constant = 0.0
        # Of each table that is left, the clique that made it.
        self._origin: dict[int, int | None] = {}
        self._most_us = most_us
        # Where no bound can drop rows, there is nothing to tighten.
        self._tight = most_us == inf
        for table in left.tables.values():
            self._add(table, None)
        while not self.in_order(self._eliminate, self._stops, stops_at_large=lambda: not self._tight):
            self._tighten()

    def _stops(self, estimate: Estimate) -> bool:
        if self.limits.over:
            raise TooLargeError("the time was over before every variable was eliminated")
        return estimate[0] > MOST_ROWS and not self._tight

    def cheapest(self, totals: list[Costs]) -> dict[int, Costs]:
        """Return, for each variable, the best total through each of its states, inf where there is none.

        The total through a row is what its clique says below, and what the clique
        above says beside it: the best total of the rows above that agree, less what this clique has in them already.
        """
        best = {}
        for clique, total in zip(self.cliques, totals, strict=True):
            of_states = np.full(self.state_counts[clique.variable], np.inf)
            np.minimum.at(of_states, clique.joined.column(clique.variable), total)
            best[clique.variable] = of_states
        return best

    def totals(self) -> list[Costs]:
        """Return, for each clique, the best total through each row of its joined table; see `cheapest`."""
        beside = [np.zeros(clique.result.rows) for clique in self.cliques]
        for clique, costs in zip(self.cliques, beside, strict=True):
            if not clique.result.variables:
                costs += self.constant - clique.result.costs
        found = []
        for place in reversed(range(len(self.cliques))):
            clique = self.cliques[place]
            total = clique.joined.costs + beside[place][self.rows_of(clique.joined, clique.result)]
            found.append(total)
            for below in clique.below:
                result = self.cliques[below].result
                outer = np.full(result.rows, np.inf)
                np.minimum.at(outer, self.rows_of(clique.joined, result), total)
                # A row that no row above agrees with is part of no assignment.
                beside[below] = outer - result.costs
        return found[::-1]

    def rows_of(self, wide: CostTable, narrow: CostTable) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the row of the narrow table that agrees with each row of the wide one, which has all its variables."""
        both = [np.concatenate((narrow.column(v), wide.column(v))) for v in narrow.variables]
        key, span = keys(both, [self.state_counts[v] for v in narrow.variables], narrow.rows + wide.rows)
        row = np.zeros(span, np.int64)
        row[key[: narrow.rows]] = np.arange(narrow.rows)
        found: np.ndarray[tuple[int], np.dtype[np.int64]] = row[key[narrow.rows :]]
        return found

    def _eliminate(self, variable: int, estimate: Estimate) -> tuple[int, ...]:
        most_rows = inf if estimate == UNKNOWN else JOINED * MOST_ROWS
        places = sorted(self.readers[variable], key=lambda place: self.tables[place].rows)
        joined = self.tables[places[0]]
        for place in places[1:]:
            joined = join(joined, self.tables[place], self.state_counts, self.limits, most_rows)
        if not joined.rows:
            factors = ", ".join(repr(self.tables[place].name) for place in places)
            raise InfeasibleError(f"no row fits all of {factors}")
        below = tuple(origin for place in places if (origin := self._origin[place]) is not None)
        self._take_bucket(variable)
        result, _ = minimised(joined, variable, self.state_counts)
        self.limits.hold(joined.nbytes + result.nbytes)
        self.cliques.append(Clique(variable, joined, result, below))
        self._add(result, len(self.cliques) - 1)
        self._tight = self._most_us == inf
        return result.variables

    def _add(self, table: CostTable, origin: int | None) -> None:
        if table.variables:
            self._origin[self._place(table)] = origin
        else:
            self.constant += float(table.costs.sum())

    def _tighten(self) -> None:
        """Move costs between tables, which changes no total, and drop rows of which every total is above the most."""
        left = consistent(self.names, self.tables, self.state_counts)
        left = tightened(left, near_order(left), SWEEPS)
        self.tables = pruned(left, self._most_us - self.constant - bound_us(left.tables.values())).tables
        self._counts.clear()
        self._tight = True

    def _estimate(self, variable: int, alive: Mapping[int, int]) -> Estimate:
        """Estimate the rows of a joined table, which stays, and those of its result."""
        result, joined = super()._estimate(variable, alive)
        return joined, result


class BestAssignments:
    """A tree with all variables eliminated, and, for each row of its tables, the best row of each table beside it.

    Attributes:
        cheapest: variable -> the best total through each of its states, inf where there is none.

    Cost:
        Once, O(rows) of the tree's tables; then a few lookups per variable for each assignment.

    Source:
        Dawid, Applications of a general propagation algorithm for probabilistic expert systems (1992), for the best
        assignment through each state.
    """

    def __init__(self, tree: JunctionTree) -> None:
        self._tree = tree
        self._totals = tree.totals()
        self.cheapest = tree.cheapest(self._totals)
        self._place = {clique.variable: place for place, clique in enumerate(tree.cliques)}
        self._above: dict[int, int] = {below: place for place, b in enumerate(tree.cliques) for below in b.below}
        self._to_result: list[Integers] = []  # of each joined row, the row of the clique's result
        self._inside: list[Integers] = []  # of each row of the result, the best joined row of its own clique
        self._outside: dict[int, Integers] = {}  # of each row of the result, the best joined row of the clique above
        self._to_below: dict[int, Integers] = {}  # of each joined row of the clique above, the row of the result
        for place, clique in enumerate(tree.cliques):
            total = self._totals[place]
            down = tree.rows_of(clique.joined, clique.result)
            self._to_result.append(down)
            self._inside.append(_first_least(down, total, clique.result.rows))
            for below in clique.below:
                rows = tree.rows_of(clique.joined, tree.cliques[below].result)
                self._to_below[below] = rows
                self._outside[below] = _first_least(rows, total, tree.cliques[below].result.rows)

    def codes(self, variable: int, state: int) -> dict[int, int]:
        """Return the states of an assignment that has this one and the total that `cheapest` says, a finite one."""
        place = self._place[variable]
        total = np.where(self._tree.cliques[place].joined.column(variable) == state, self._totals[place], np.inf)
        codes: dict[int, int] = {}
        pending = [(place, int(np.argmin(total)), place)]
        # What shares no variable with it has a root of its own.
        root = place
        while root in self._above:
            root = self._above[root]
        pending += [(other, int(self._inside[other][0]), other) for other, clique in enumerate(self._tree.cliques)
                    if other != root and other not in self._above]  # fmt: skip
        while pending:
            place, row, origin = pending.pop()
            clique = self._tree.cliques[place]
            codes[clique.variable] = int(clique.joined.column(clique.variable)[row])
            for below in clique.below:
                if below != origin:
                    pending.append((below, int(self._inside[below][self._to_below[below][row]]), place))
            above = self._above.get(place)
            if above is not None and above != origin:
                pending.append((above, int(self._outside[place][self._to_result[place][row]]), place))
        return codes


def _first_least(group: Integers, costs: Costs, count: int) -> Integers:
    """Return, for each of `count` groups, the first row of least cost; 0 where a group has none."""
    best = np.full(count, np.inf)
    np.minimum.at(best, group, costs)
    rows = np.flatnonzero(costs == best[group])[::-1]
    first = np.zeros(count, np.int64)
    first[group[rows]] = rows
    return first


def min_marginals(
    problem: Problem, *, most_us: float = inf, memory_limit_bytes: float = MEMORY_BYTES
) -> Mapping[str, Mapping[State, float]]:
    """Return the best total through each state of each variable, inf where no assignment has it.

    One pass up an elimination tree and one down it: not one solution per state. Every state counts, so only what is
    dearer than `most_us` can be ruled out by bounds first: without it, a problem can be too large for this that `exact`
    solves in a moment.

    Args:
        most_us: totals above it are not looked for, and given as inf.
        memory_limit_bytes: what all tables of the tree may need together.

    Returns:
        variable -> state -> total in microseconds; the least of each variable is the optimum. All are inf where no
        assignment satisfies every factor.

    Raises:
        ProblemError: the tables would need more memory; they are counted before they are made.
    """
    network = encode(problem)
    try:
        parts = split(arc_consistent(network), network.state_counts)
        tree = JunctionTree(parts.left, parts.state_counts, SolverLimits(memory_limit_bytes), with_margin(most_us))
        best = tree.cheapest(tree.totals())
        best = {v: np.where(each <= with_margin(most_us), each, inf) for v, each in best.items()}
    except InfeasibleError:
        best = {v: np.full(count, inf) for v, count in enumerate(network.state_counts)}
    return MappingProxyType(
        {
            name: MappingProxyType(dict(zip(network.states[v], best[v].tolist(), strict=True)))
            for v, name in enumerate(network.names)
        }
    )
