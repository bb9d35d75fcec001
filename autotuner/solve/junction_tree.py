"""Junction tree: elimination that keeps its tables; two passes give the min-marginal of every state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import Consistent, arc_consistent, bound_us, consistent
from autotuner.solve.bucket_elimination import estimated_rows
from autotuner.solve.exact import with_margin
from autotuner.solve.limits import MEMORY_BYTES, SolverLimits, TooLargeError
from autotuner.solve.problem import Problem, State
from autotuner.solve.reduced_costs import SWEEPS, near_order, pruned, tightened
from autotuner.solve.tables import Costs, CostTable, Integers, encode, join, keys, minimised
from autotuner.solve.variable_splitting import split

# Before a join of more rows than these, bounds drop what they can; one of so many times as many is put off.
MOST_ROWS = 5_000
JOINED = 16


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """A variable that was eliminated.

    Args:
        joined: all tables that named it, those made by the buckets below among them.
        result: what was left of `joined` without it.
        below: places of the buckets whose results went into `joined`.
    """

    variable: int
    joined: CostTable
    result: CostTable
    below: tuple[int, ...]


class JunctionTree:
    """All variables eliminated, one bucket each, the last one eliminated at the root.

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
        self._names = left.names
        self.state_counts = state_counts
        self.limits = limits
        self.buckets: list[Bucket] = []
        self.constant = 0.0
        # Of each table that is left, the bucket that made it.
        self._origin: dict[int, int | None] = {}
        self._tables: dict[int, CostTable] = {}
        self._readers: dict[int, dict[int, None]] = {}
        for table in left.tables.values():
            self._add(table, None)
        rows = self._estimates()
        tight = most_us == np.inf
        while rows:
            if limits.over:
                raise TooLargeError("the time was over before every variable was eliminated")
            variable = min(rows, key=lambda v: (rows[v], v))
            wide = rows[variable][0] > MOST_ROWS
            if not wide or tight:
                try:
                    touched = self._eliminate(variable, np.inf if rows[variable][0] == np.inf else JOINED * MOST_ROWS)
                except TooLargeError:
                    if rows[variable][0] == np.inf:
                        raise
                    # Estimated too low; what is dropped or made later may still make it smaller.
                    rows[variable] = (np.inf, np.inf)
                    wide = True
                else:
                    del rows[variable]
                    for other in touched:
                        if other in rows:
                            rows[other] = self._estimate(other)
                    tight = most_us == np.inf
            if wide and not tight:
                self._tighten(most_us)
                rows = self._estimates()
                tight = True

    def cheapest(self, totals: list[Costs]) -> dict[int, Costs]:
        """Return, for each variable, the best total through each of its states, inf where there is none.

        The total through a row is what its bucket says below, and what the bucket
        above says beside it: the best total of the rows above that agree, less what this bucket has in them already.
        """
        best = {}
        for bucket, total in zip(self.buckets, totals, strict=True):
            of_states = np.full(self.state_counts[bucket.variable], np.inf)
            np.minimum.at(of_states, bucket.joined.column(bucket.variable), total)
            best[bucket.variable] = of_states
        return best

    def totals(self) -> list[Costs]:
        """Return, for each bucket, the best total through each row of its joined table; see `cheapest`."""
        beside = [np.zeros(bucket.result.rows) for bucket in self.buckets]
        for bucket, costs in zip(self.buckets, beside, strict=True):
            if not bucket.result.variables:
                costs += self.constant - bucket.result.costs
        found = []
        for place in reversed(range(len(self.buckets))):
            bucket = self.buckets[place]
            total = bucket.joined.costs + beside[place][self.rows_of(bucket.joined, bucket.result)]
            found.append(total)
            for below in bucket.below:
                result = self.buckets[below].result
                outer = np.full(result.rows, np.inf)
                np.minimum.at(outer, self.rows_of(bucket.joined, result), total)
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

    def _eliminate(self, variable: int, most_rows: float) -> tuple[int, ...]:
        places = sorted(self._readers[variable], key=lambda place: self._tables[place].rows)
        joined = self._tables[places[0]]
        for place in places[1:]:
            joined = join(joined, self._tables[place], self.state_counts, self.limits, most_rows)
        if not joined.rows:
            factors = ", ".join(repr(self._tables[place].name) for place in places)
            raise InfeasibleError(f"no row fits all of {factors}")
        below = tuple(origin for place in places if (origin := self._origin[place]) is not None)
        for place in places:
            for other in self._tables.pop(place).variables:
                del self._readers[other][place]
        del self._readers[variable]
        result, _ = minimised(joined, variable, self.state_counts)
        self.limits.hold(joined.nbytes + result.nbytes)
        self.buckets.append(Bucket(variable, joined, result, below))
        self._add(result, len(self.buckets) - 1)
        return result.variables

    def _add(self, table: CostTable, origin: int | None) -> None:
        if not table.variables:
            self.constant += float(table.costs.sum())
            return
        place = len(self._origin)
        self._origin[place] = origin
        self._tables[place] = table
        for variable in table.variables:
            self._readers.setdefault(variable, {})[place] = None

    def _tighten(self, most_us: float) -> None:
        """Move costs between tables, which changes no total, and drop rows of which every total is above the most."""
        left = consistent(self._names, self._tables, self.state_counts)
        left = tightened(left, near_order(left), SWEEPS)
        self._tables = pruned(left, most_us - self.constant - bound_us(left.tables.values())).tables

    def _estimates(self) -> dict[int, tuple[float, float]]:
        self._alive = {
            v: min(len(np.unique(self._tables[place].column(v))) for place in places)
            for v, places in self._readers.items()
        }
        return {v: self._estimate(v) for v in self._readers}

    def _estimate(self, variable: int) -> tuple[float, float]:
        tables = [self._tables[place] for place in self._readers[variable]]
        # Joined tables are the ones that stay.
        counts = [np.bincount(table.column(variable), minlength=self.state_counts[variable]) for table in tables]
        rows, joined = estimated_rows([table.variables for table in tables], counts, variable, self._alive)
        return joined, rows


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
        self._place = {bucket.variable: place for place, bucket in enumerate(tree.buckets)}
        self._above: dict[int, int] = {below: place for place, b in enumerate(tree.buckets) for below in b.below}
        self._to_result: list[Integers] = []  # of each joined row, the row of the bucket's result
        self._inside: list[Integers] = []  # of each row of the result, the best joined row of its own bucket
        self._outside: dict[int, Integers] = {}  # of each row of the result, the best joined row of the bucket above
        self._to_below: dict[int, Integers] = {}  # of each joined row of the bucket above, the row of the result
        for place, bucket in enumerate(tree.buckets):
            total = self._totals[place]
            down = tree.rows_of(bucket.joined, bucket.result)
            self._to_result.append(down)
            self._inside.append(_first_least(down, total, bucket.result.rows))
            for below in bucket.below:
                rows = tree.rows_of(bucket.joined, tree.buckets[below].result)
                self._to_below[below] = rows
                self._outside[below] = _first_least(rows, total, tree.buckets[below].result.rows)

    def codes(self, variable: int, state: int) -> dict[int, int]:
        """Return the states of an assignment that has this one and the total that `cheapest` says, a finite one."""
        place = self._place[variable]
        total = np.where(self._tree.buckets[place].joined.column(variable) == state, self._totals[place], np.inf)
        codes: dict[int, int] = {}
        pending = [(place, int(np.argmin(total)), place)]
        # What shares no variable with it has a root of its own.
        root = place
        while root in self._above:
            root = self._above[root]
        pending += [(other, int(self._inside[other][0]), other) for other, bucket in enumerate(self._tree.buckets)
                    if other != root and other not in self._above]  # fmt: skip
        while pending:
            place, row, origin = pending.pop()
            bucket = self._tree.buckets[place]
            codes[bucket.variable] = int(bucket.joined.column(bucket.variable)[row])
            for below in bucket.below:
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
