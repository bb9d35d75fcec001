"""Label setting: elimination that keeps, for each combination of states, each unbeaten pair of time and bytes."""

from collections.abc import Mapping

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import bound_us
from autotuner.solve.buckets import Buckets, Estimate
from autotuner.solve.labels import Labels, joined, undominated_rows
from autotuner.solve.lagrangian_relaxation import LagrangianRelaxation
from autotuner.solve.limits import SolverLimits, TooLargeError
from autotuner.solve.tables import CostTable

# Results with more labels than these wait until bounds have dropped what they can.
MOST_LABELS = 4_000.0
# A join may have so many times as many pairs as its result may have labels.
PAIRS = 25
# Rows that bounds must drop, as a share, for another round to pay.
DROPPED = 0.1


class LabelSetting(Buckets[Labels]):
    """The labels that are left while variables are eliminated.

    Args:
        start: what there is.
        most_us: time and price of the dearest assignment that is looked for.
        most_pairs: that joins may make in all.
    """

    def __init__(
        self,
        start: LagrangianRelaxation,
        limits: SolverLimits,
        *,
        most_us: float = np.inf,
        most_pairs: float = np.inf,
    ) -> None:
        super().__init__(start.state_counts)
        self.names = start.names
        self.price = start.price
        self.limits = limits
        self.most_us = most_us
        self.most_pairs = most_pairs
        for labels in start.tables.values():
            self._add(labels)

    def left(self) -> LagrangianRelaxation:
        """Return what is left, arc consistent."""
        return LagrangianRelaxation(self.names, self.state_counts, dict(self.tables), self.price).consistent({})

    def eliminated(self, most_rows: float) -> Labels | None:
        """Return the labels of whole assignments when all variables are eliminated, None where there were too many.

        Raises:
            InfeasibleError: no assignment within what is looked for.
        """
        most = min(MOST_LABELS, most_rows)
        while not self.limits.over and self.most_pairs >= 0:
            dropped = False
            if self.most_us < np.inf:
                before = self.rows
                self._tighten()
                dropped = self.rows <= (1 - DROPPED) * before
            if self.run(most):
                return self._whole(most_rows)
            if not dropped:
                if most >= most_rows:
                    return None
                most = min(4 * most, most_rows)
        return None

    def run(self, most_rows: float) -> bool:
        """Eliminate the variable whose result is estimated to be the smallest, again and again.

        Returns:
            Whether all are; otherwise the next one has more labels.

        Raises:
            InfeasibleError: the tables of some variable share no row.
        """

        def eliminate(variable: int, _: Estimate) -> tuple[int, ...]:
            return self._eliminate(variable, most_rows)

        def stops(estimate: Estimate) -> bool:
            return estimate[1] > PAIRS * most_rows or self.limits.over or self.most_pairs < 0

        return self.in_order(eliminate, stops)

    def _tighten(self) -> None:
        """Move costs between tables for a tight bound, drop labels that no assignment within `most_us` can have.

        Raises:
            InfeasibleError: nothing is left.
        """
        left = self.left().tightened().within(self.most_us)
        settled = [v for v, domain in left.left.domains.items() if domain.sum() == 1]
        self.tables, self.readers, self._counts = {}, {}, {}
        for labels in left.tables.values():
            narrow = labels.without(settled)
            if narrow is not labels:
                narrow = undominated_rows(narrow, self.state_counts)
            self._add(narrow)

    def _spare_us(self) -> float:
        """Return how far an assignment that is looked for may lie above the sum of all cheapest rows."""
        return self.most_us - bound_us(labels.table for labels in self.tables.values())

    def _add(self, labels: Labels) -> None:
        """Add labels, as one with every table whose variables are among their own, or that has all of theirs."""
        self._place(self._absorbing(labels, self._join))

    def _join(self, table: Labels, other: Labels) -> Labels:
        both = joined(table, other, self.state_counts, self.limits, MOST_LABELS * PAIRS)
        several = both.rows and table.spread > 1 and other.spread > 1
        return undominated_rows(both, self.state_counts) if several else both

    def _estimate(self, variable: int, alive: Mapping[int, int]) -> Estimate:
        """Return how many labels the result has, if as many are left of each combination, and the join before that."""
        result, rows = super()._estimate(variable, alive)
        spread = float(np.prod([self.tables[place].spread for place in self.readers[variable]]))
        return min(result * spread, rows), rows

    def _eliminate(self, variable: int, most_rows: float) -> tuple[int, ...]:
        both = self._joined(self._bucket(variable), most_rows)
        narrow = both.without((variable,))
        found = undominated_rows(narrow, self.state_counts)
        if found.rows > most_rows:
            raise TooLargeError(f"without {self.names[variable]!r}, {found.rows:,} labels are left")
        self._take_bucket(variable)
        # Only what is left is needed to read the states back.
        ((part, rows),) = found.parts
        self._add(found.made_of(((part.take(rows), np.arange(len(rows))),)))
        return found.table.variables

    def _joined(self, several: list[Labels], most_rows: float) -> Labels:
        spare = self._spare_us() if self.most_us < np.inf else np.inf
        both, within = several[0], float(several[0].table.costs.min())
        for labels in several[1:]:
            within += float(labels.table.costs.min())
            both = joined(both, labels, self.state_counts, self.limits, PAIRS * most_rows, within + spare)
            if not both.rows:
                raise InfeasibleError(f"no row fits all of {', '.join(repr(each.table.name) for each in several)}")
            self.most_pairs -= both.rows
        return both

    def _whole(self, most_rows: float) -> Labels:
        """Return the labels of all that is left as one table."""
        whole = nothing()
        spare = self._spare_us() if self.most_us < np.inf else np.inf
        within = 0.0
        for labels in sorted(self.tables.values(), key=lambda labels: labels.rows):
            within += float(labels.table.costs.min())
            whole = joined(whole, labels, self.state_counts, self.limits, PAIRS * most_rows, within + spare)
            if not whole.rows:
                raise InfeasibleError("no label of one part agrees with any of another")
            whole = undominated_rows(whole, self.state_counts)
        return whole


def nothing() -> Labels:
    """Return the one label of no variables, which weighs nothing."""
    return Labels(CostTable("", (), np.zeros((0, 1), np.int32), np.zeros(1)), np.zeros(1), np.zeros(1, np.int64))
