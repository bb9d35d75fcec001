"""Rows of states with a time and held bytes: several of the same states, where none is better than another in both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from autotuner.solve.limits import SolverLimits, TooLargeError
from autotuner.solve.tables import Codes, Costs, CostTable, Integers, keys

Rows = NDArray[np.intp]


@dataclass(frozen=True, eq=False, slots=True)
class Labels:
    """Partial assignments, by the states of the variables that others still see.

    Args:
        table: their states; several rows may have the same. Its costs are what bounds are made of.
        time_us, held_bytes: of each row.
        parts: what was joined, and which row of it is in each row of this.
        spread: rows per different states.
    """

    table: CostTable
    time_us: Costs
    held_bytes: Integers
    parts: tuple[tuple["Labels", Rows], ...] = ()
    spread: float = 1.0

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def variables(self) -> tuple[int, ...]:
        return self.table.variables

    @property
    def rows(self) -> int:
        return self.table.rows

    def column(self, variable: int) -> Codes:
        """Return the variable's state in each row."""
        return self.table.column(variable)

    def take(self, rows: Rows) -> "Labels":
        """Return these rows only."""
        table = self.table
        return Labels(
            CostTable(table.name, table.variables, table.columns[:, rows], table.costs[rows]),
            self.time_us[rows],
            self.held_bytes[rows],
            tuple((part, numbers[rows]) for part, numbers in self.parts),
            self.spread,
        )

    def without(self, variables: Sequence[int]) -> "Labels":
        """Return the rows without the columns of these variables, which can still be read from the parts."""
        if not set(variables) & set(self.table.variables):
            return self
        return replace(self, table=self.table.without(variables), parts=((self, np.arange(self.rows)),))

    def made_of(self, parts: tuple[tuple["Labels", Rows], ...]) -> "Labels":
        """Return the same rows, to be read back from other parts."""
        return replace(self, parts=parts)

    def costing(self, costs: Costs) -> "Labels":
        """Return the same rows with other costs."""
        return replace(self, table=self.table.costing(costs))

    def cheapest(self, state_counts: Sequence[int]) -> Rows:
        """Return the cheapest row of each combination of states; of equal ones the first."""
        if self.spread == 1:
            return np.arange(self.rows)
        key, _ = keys(self.table.columns, [state_counts[v] for v in self.table.variables], self.rows)
        order = np.lexsort((self.table.costs, key))
        first = np.ones(len(order), np.bool_)
        first[1:] = key[order[1:]] != key[order[:-1]]
        return order[first]

    def codes(self, row: int) -> dict[int, int]:
        """Return the states of a row, of all variables that are gone as well."""
        codes: dict[int, int] = {}
        left: list[tuple[Labels, int]] = [(self, row)]
        while left:
            labels, number = left.pop()
            codes |= zip(labels.table.variables, labels.table.columns[:, number].tolist(), strict=True)
            left.extend((part, int(rows[number])) for part, rows in labels.parts)
        return codes


def joined(
    left: Labels,
    right: Labels,
    state_counts: Sequence[int],
    limits: SolverLimits,
    most_rows: float,
    most_us: float = np.inf,
) -> Labels:
    """Return every pair of rows that agree and cost at most `most_us` together: weights added.

    Raises:
        TooLargeError: the pairs are more than `most_rows`, or need more memory than there may be.
    """
    one, other = left.table, right.table
    shared = [v for v in one.variables if v in other.variables]
    added = [v for v in other.variables if v not in one.variables]
    both = [np.concatenate((one.column(v), other.column(v))) for v in shared]
    key, span = keys(both, [state_counts[v] for v in shared], one.rows + other.rows)
    left_key, right_key = key[: one.rows], key[one.rows :]
    if most_us < np.inf:
        # Rows too dear with the cheapest that agrees make no pairs.
        left_rows = _affordable(left_key, one.costs, right_key, other.costs, span, most_us)
        right_rows = _affordable(right_key, other.costs, left_key, one.costs, span, most_us)
    else:
        left_rows, right_rows = np.arange(one.rows), np.arange(other.rows)
    left_key, right_key = left_key[left_rows], right_key[right_rows]
    counts = np.bincount(right_key, minlength=span)
    partners = counts[left_key]
    rows = int(partners.sum())
    if rows > most_rows:
        raise TooLargeError(f"joining {one.name!r} with {other.name!r} makes {rows:,} labels, above {most_rows:,.0f}")
    variables = (*one.variables, *added)
    limits.admit(
        rows, [state_counts[v] for v in variables] + [1] * 4, lambda: f"joining {one.name!r} with {other.name!r}"
    )
    order = np.argsort(right_key, kind="stable")
    first = (np.cumsum(counts) - counts)[left_key]
    within = np.arange(rows) - np.repeat(np.cumsum(partners) - partners, partners)
    left_rows = np.repeat(left_rows, partners)
    right_rows = right_rows[order[np.repeat(first, partners) + within]]
    costs = one.costs[left_rows] + other.costs[right_rows]
    if most_us < np.inf:
        fit = costs <= most_us
        left_rows, right_rows, costs = left_rows[fit], right_rows[fit], costs[fit]
    columns = np.concatenate([one.columns[:, left_rows], *(other.column(v)[right_rows][np.newaxis] for v in added)])
    return Labels(
        CostTable(one.name, variables, columns, costs),
        left.time_us[left_rows] + right.time_us[right_rows],
        left.held_bytes[left_rows] + right.held_bytes[right_rows],
        ((left, left_rows), (right, right_rows)),
        left.spread * right.spread,
    )


def _affordable(
    key: Integers, costs: Costs, other_key: Integers, other_costs: Costs, span: int, most_us: float
) -> Rows:
    least = np.full(span, np.inf)
    np.minimum.at(least, other_key, other_costs)
    return np.flatnonzero(costs + least[key] <= most_us)


def undominated_rows(labels: Labels, state_counts: Sequence[int]) -> Labels:
    """Return the rows to which no other of the same states is at least equal in time and held bytes.

    Of equal rows the first stays. The result is in order of states, then of bytes.
    """
    table = labels.table
    key, _ = keys(table.columns, [state_counts[v] for v in table.variables], table.rows)
    _, rank = np.unique(labels.time_us, return_inverse=True)
    rank = rank.astype(np.int64)
    rows = _in_order(key, _smaller(labels.held_bytes), rank)
    rows = rows[rank[rows] < _least_before(key[rows], rank[rows])]
    found = labels.take(rows)
    ordered = key[rows]
    groups = 1 + np.count_nonzero(ordered[1:] != ordered[:-1]) if len(rows) else 1
    return replace(found, spread=len(rows) / groups)


def _smaller(counts: Integers) -> Integers:
    """Return numbers in the same order and as far apart in proportion, the least of them 0."""
    above = counts - counts.min(initial=counts[0] if len(counts) else 0)
    smaller: Integers = above // max(1, int(np.gcd.reduce(above)))
    return smaller


def _in_order(*columns: Integers) -> Rows:
    """Return the order of rows by the first column, then the next, and so on; equal rows stay as they are.

    Numbers are 0 or more. One sort of 64 bits is many times faster than one for each column.
    """
    count = len(columns[0])
    spans = [int(column.max(initial=0)) + 1 for column in (*columns, np.arange(count))]
    if prod(spans) >= 1 << 63:
        by_columns: Rows = np.lexsort(columns[::-1])
        return by_columns
    packed = np.zeros(count, np.int64)
    for column, span in zip(columns, spans, strict=False):
        packed = packed * span + column
    order: Rows = np.argsort(packed * count + np.arange(count))
    return order


def _least_before(blocks: Integers, ranks: Integers) -> Integers:
    """Return, for each row, the least rank of the rows before it in its block, whose rows are neighbours."""
    if not len(blocks):
        return ranks
    number = np.cumsum(np.concatenate(([0], blocks[1:] != blocks[:-1])))
    # Ranks of a later block lie below those of an earlier one, so that one running minimum serves all.
    none = int(ranks.max()) + 1
    offset = number * (none + 1)
    running = np.minimum.accumulate(ranks - offset)
    before = np.empty_like(ranks)
    before[0] = none
    before[1:] = np.where(number[1:] == number[:-1], running[:-1] + offset[1:], none)
    return before
