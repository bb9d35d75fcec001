"""The best whole assignment through any state of any variable, read off one tree that was solved once."""

import numpy as np

from autotuner.solve.tables import Costs, Integers
from autotuner.solve.tree import Tree


class Through:
    """A tree with all variables eliminated, and, for each row of its tables, the best row of each table beside it.

    Args:
        tree: made with no variable kept.

    Attributes:
        cheapest: variable -> the best total through each of its states, inf where there is none.

    Cost:
        Once, O(rows) of the tree's tables; then a few lookups per variable for each assignment.

    Source:
        Dawid, Applications of a general propagation algorithm for probabilistic expert systems (1992), for the best
        assignment through each state.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._totals = tree.totals()
        self._place = {bucket.variable: place for place, bucket in enumerate(tree.buckets)}
        self._above: dict[int, int] = {below: place for place, b in enumerate(tree.buckets) for below in b.below}
        self._to_result: list[Integers] = []  # of each joined row, the row of the bucket's result
        self._inside: list[Integers] = []  # of each row of the result, the best joined row of its own bucket
        self._outside: dict[int, Integers] = {}  # of each row of the result, the best joined row of the bucket above
        self._to_below: dict[int, Integers] = {}  # of each joined row of the bucket above, the row of the result
        self.cheapest: dict[int, Costs] = {}
        for place, bucket in enumerate(tree.buckets):
            total, states = self._totals[place], bucket.joined.column(bucket.variable)
            self.cheapest[bucket.variable] = np.full(tree.state_counts[bucket.variable], np.inf)
            np.minimum.at(self.cheapest[bucket.variable], states, total)
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
