"""Elimination that keeps its tables: costs flow up it once and down again, then every row knows its best total."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.bounds import near_order, pruned, tightened
from autotuner.solve.consistency import Consistent, bound_us, consistent
from autotuner.solve.elimination import SWEEPS, estimated_rows
from autotuner.solve.limits import Limits, TooLargeError
from autotuner.solve.tables import Costs, Table, join, keys, minimised

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
    joined: Table
    result: Table
    below: tuple[int, ...]


class Tree:
    """All variables but the kept ones eliminated, one bucket each, the last one eliminated at the root.

    Args:
        left: arc consistent tables.
        state_counts: number of states of each variable.
        kept: variables that stay.
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
        kept: Collection[int],
        limits: Limits,
        most_us: float = np.inf,
    ) -> None:
        self._names = left.names
        self.state_counts = state_counts
        self.limits = limits
        self.buckets: list[Bucket] = []
        self.constant = 0.0
        # Of each table that is left, the bucket that made it.
        self._origin: dict[int, int | None] = {}
        self._tables: dict[int, Table] = {}
        self._readers: dict[int, dict[int, None]] = {}
        for table in left.tables.values():
            self._add(table, None)
        rows = self._estimates(kept)
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
                rows = self._estimates(kept)
                tight = True

    def left(self) -> list[Table]:
        """Return the tables over kept variables that are left, smallest first."""
        return sorted(self._tables.values(), key=lambda table: table.rows)

    def cheapest(self) -> dict[int, Costs]:
        """Return, for each variable, the best total through each of its states, inf where there is none.

        Every variable must be eliminated. The total through a row is what its bucket says below, and what the bucket
        above says beside it: the best total of the rows above that agree, less what this bucket has in them already.
        """
        best = {}
        for bucket, total in zip(self.buckets, self.totals(), strict=True):
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

    def rows_of(self, wide: Table, narrow: Table) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
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

    def _add(self, table: Table, origin: int | None) -> None:
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

    def _estimates(self, kept: Collection[int]) -> dict[int, tuple[float, float]]:
        self._alive = {
            v: min(len(np.unique(self._tables[place].column(v))) for place in places)
            for v, places in self._readers.items()
        }
        return {v: self._estimate(v) for v in self._readers if v not in kept}

    def _estimate(self, variable: int) -> tuple[float, float]:
        tables = [self._tables[place] for place in self._readers[variable]]
        # Joined tables are the ones that stay.
        counts = [np.bincount(table.column(variable), minlength=self.state_counts[variable]) for table in tables]
        rows, joined = estimated_rows([table.variables for table in tables], counts, variable, self._alive)
        return joined, rows
