"""Elimination with labels: of each combination of states, every time that fewer bytes can be bought with."""

import numpy as np

from autotuner.errors import InfeasibleError
from autotuner.solve.consistency import bound_us
from autotuner.solve.elimination import estimated_rows
from autotuner.solve.labelled import Labelled
from autotuner.solve.labels import Labels, joined, undominated_rows
from autotuner.solve.limits import Limits, TooLargeError
from autotuner.solve.tables import Table

# Results with more labels than these wait until bounds have dropped what they can.
MOST_LABELS = 4_000.0
# A join may have so many times as many pairs as its result may have labels.
PAIRS = 25
# Rows that bounds must drop, as a share, for another round to pay.
DROPPED = 0.1


class Labelling:
    """The labels that are left while variables are eliminated.

    Args:
        start: what there is.
        most_us: time and price of the dearest assignment that is looked for.
        most_pairs: that joins may make in all.
    """

    def __init__(
        self,
        start: Labelled,
        limits: Limits,
        *,
        most_us: float = np.inf,
        most_pairs: float = np.inf,
    ) -> None:
        self.names = start.names
        self.state_counts = start.state_counts
        self.price = start.price
        self.limits = limits
        self.most_us = most_us
        self.most_pairs = most_pairs
        self.tables: dict[int, Labels] = {}
        self.readers: dict[int, dict[int, None]] = {}
        self._made = 0
        for labels in start.tables.values():
            self._add(labels)

    def left(self) -> Labelled:
        """Return what is left, arc consistent."""
        return Labelled(self.names, self.state_counts, dict(self.tables), self.price).consistent({})

    def eliminated(self, most_rows: float) -> Labels | None:
        """Return the labels of whole assignments when all variables are eliminated, None where there were too many.

        Raises:
            InfeasibleError: no assignment within what is looked for.
        """
        most = min(MOST_LABELS, most_rows)
        while not self.limits.over and self.most_pairs >= 0:
            dropped = False
            if self.most_us < np.inf:
                before = sum(labels.rows for labels in self.tables.values())
                self._tighten()
                dropped = sum(labels.rows for labels in self.tables.values()) <= (1 - DROPPED) * before
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
        alive = {v: self._states(v) for v in self.readers}
        estimates = {v: self._estimate(v, alive) for v in self.readers}
        while estimates:
            variable = min(estimates, key=lambda v: (estimates[v], v))
            if estimates[variable][1] > PAIRS * most_rows or self.limits.over or self.most_pairs < 0:
                return False
            try:
                touched = self._eliminate(variable, most_rows)
            except TooLargeError:
                estimates[variable] = (np.inf, np.inf)
                continue
            del estimates[variable]
            for other in touched:
                if other in estimates:
                    estimates[other] = self._estimate(other, alive)
        return True

    def _tighten(self) -> None:
        """Move costs between tables for a tight bound, drop labels that no assignment within `most_us` can have.

        Raises:
            InfeasibleError: nothing is left.
        """
        left = self.left().tightened().within(self.most_us)
        settled = [v for v, domain in left.left.domains.items() if domain.sum() == 1]
        self.tables, self.readers = {}, {}
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
        while (both := self._with_narrower(labels)) is not None:
            labels = both
        self.tables[self._made] = labels
        for variable in labels.table.variables:
            self.readers.setdefault(variable, {})[self._made] = None
        self._made += 1

    def _with_narrower(self, labels: Labels) -> Labels | None:
        scope = set(labels.table.variables)
        for place in {place: None for v in labels.table.variables for place in self.readers.get(v, ())}:
            other = self.tables[place]
            if not (scope.issuperset(other.table.variables) or scope.issubset(other.table.variables)):
                continue
            try:
                both = joined(labels, other, self.state_counts, self.limits, MOST_LABELS * PAIRS)
            except TooLargeError:
                continue
            self._remove(place)
            if not both.rows:
                raise InfeasibleError(f"no row of {labels.table.name!r} agrees with any of {other.table.name!r}")
            if labels.spread > 1 and other.spread > 1:
                return undominated_rows(both, self.state_counts)
            return both
        return None

    def _remove(self, place: int) -> Labels:
        labels = self.tables.pop(place)
        for variable in labels.table.variables:
            del self.readers[variable][place]
        return labels

    def _states(self, variable: int) -> int:
        return min(len(np.unique(self.tables[place].table.column(variable))) for place in self.readers[variable])

    def _estimate(self, variable: int, alive: dict[int, int]) -> tuple[float, float]:
        """Return how many labels the result has, if as many are left of each combination, and the join before that."""
        several = [self.tables[place] for place in self.readers[variable]]
        count = self.state_counts[variable]
        counts = [np.bincount(labels.table.column(variable), minlength=count) for labels in several]
        result, rows = estimated_rows([labels.table.variables for labels in several], counts, variable, alive)
        spread = float(np.prod([labels.spread for labels in several]))
        return min(result * spread, rows), rows

    def _eliminate(self, variable: int, most_rows: float) -> tuple[int, ...]:
        several = sorted((self.tables[place] for place in self.readers[variable]), key=lambda labels: labels.rows)
        both = self._joined(several, most_rows)
        narrow = both.without((variable,))
        found = undominated_rows(narrow, self.state_counts)
        if found.rows > most_rows:
            raise TooLargeError(f"without {self.names[variable]!r}, {found.rows:,} labels are left")
        for place in list(self.readers[variable]):
            self._remove(place)
        del self.readers[variable]
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
    return Labels(Table("", (), np.zeros((0, 1), np.int32), np.zeros(1)), np.zeros(1), np.zeros(1, np.int64))
