"""Min-sum bucket elimination: one variable after another is minimised out, then the states are read back."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import log2

import numpy as np

from autotuner.checkpoint import checkpoint
from autotuner.errors import InfeasibleError
from autotuner.solve.arc_consistency import Consistent, Domain, bound_us, consistent, first_assignment
from autotuner.solve.buckets import Buckets, Estimate
from autotuner.solve.limits import SolverLimits, needed_bytes
from autotuner.solve.reduced_costs import SWEEPS, near_order, pruned, tightened
from autotuner.solve.tables import Codes, Costs, CostTable, join, minimised

# A join may be this much larger than what is left of it after the projection.
JOINED = 20


@dataclass(frozen=True, eq=False, slots=True)
class ArgminTable:
    """The best state of a variable that is gone, for each row of the variables that stood beside it."""

    variable: int
    rest: CostTable
    states: Codes

    def state(self, codes: Mapping[int, int]) -> int:
        """Return the variable's best state where the others have these states."""
        match = np.ones(self.rest.rows, np.bool_)
        for other, column in zip(self.rest.variables, self.rest.columns, strict=True):
            match &= column == codes[other]
        return int(self.states[np.argmax(match)])


class BucketElimination(Buckets[CostTable]):
    """The tables that are left while variables are eliminated, and the argmin tables so far, in order.

    Args:
        names: of the variables, by number, for messages.
        state_counts: number of states of each variable.
        tables: what is to be minimised in sum; arc consistent.
        limits: what this and its copies may use.
        argmins: of variables that are gone already.
        constant: what is to be added to the sum.
    """

    def __init__(
        self,
        names: Sequence[str],
        state_counts: Sequence[int],
        tables: Iterable[CostTable],
        limits: SolverLimits,
        argmins: Iterable[ArgminTable] = (),
        constant: float = 0.0,
    ) -> None:
        super().__init__(state_counts)
        self.names = names
        self.limits = limits
        self.argmins = list(argmins)
        self.constant = constant
        self._left: Consistent | None = None
        for table in tables:
            self.add(table)

    @property
    def bound_us(self) -> float:
        """The sum of each table's cheapest row: no assignment costs less."""
        return self.constant + bound_us(self.tables.values())

    def estimated_bytes(self) -> float:
        """Return what the largest table would need at most if elimination went on without bounds."""
        return estimated_bytes((table.variables for table in self.tables.values()), self._alive())

    @property
    def most_us(self) -> float:
        """The sum of each table's dearest row: no assignment costs more."""
        return self.constant + sum(float(table.costs.max()) for table in self.tables.values())

    def spares(self) -> Costs:
        """Return how far rows lie above the cheapest of their table, in order, where they do."""
        above = [table.costs - table.costs.min() for table in self.tables.values()]
        every = np.concatenate([np.zeros(0), *above])
        return np.sort(every[every > 0])

    def copy(self) -> "BucketElimination":
        """Return another elimination that goes on from here."""
        other = BucketElimination(self.names, self.state_counts, (), self.limits, self.argmins, self.constant)
        other.tables, other._made, other._left = dict(self.tables), self._made, self._left
        other._counts = dict(self._counts)
        other.readers = {v: dict(places) for v, places in self.readers.items()}
        return other

    def codes(self) -> dict[int, int]:
        """Return the best state of each variable, all of which are eliminated."""
        codes: dict[int, int] = {}
        for argmin in reversed(self.argmins):
            codes[argmin.variable] = argmin.state(codes)
        return codes

    def run(self, most_rows: float, kept: Collection[int] = ()) -> bool:
        """Eliminate the variable whose result is estimated to be the smallest, again and again.

        Args:
            most_rows: stop where the next result would have more rows, or its join `JOINED` times as many.
            kept: variables that stay.

        Returns:
            Whether every variable is eliminated but those kept; without any, `constant` is the least total then.

        Raises:
            InfeasibleError: the tables of some variable share no row.
        """

        def eliminate(variable: int, _: Estimate) -> tuple[int, ...]:
            return self._eliminate(variable, JOINED * most_rows)

        def stops(estimate: Estimate) -> bool:
            left, joined = estimate
            return left > most_rows or joined > JOINED * most_rows

        return self.in_order(eliminate, stops, kept)

    def narrowed(self, domains: Mapping[int, Domain]) -> "BucketElimination":
        """Return an elimination of the same where these variables keep only these of their states.

        Raises:
            InfeasibleError: nothing is left.
        """
        fewer = self.copy()
        fewer._replace(self.consistent().narrowed(domains))
        return fewer

    def tighten(self, most_us: float) -> float:
        """Move costs between tables for a tight bound, drop what cannot be part of a total as low as `most_us`.

        Returns:
            The bound: no assignment of what was left costs less.

        Raises:
            InfeasibleError: nothing is left.
        """
        # Dropping rows before the sweeps as well makes the sweeps several times cheaper on what was tightened before.
        left, _ = self._pruned(self.consistent(), most_us)
        left, bound = self._pruned(tightened(left, near_order(left), SWEEPS), most_us)
        self._replace(left)
        return bound

    def _pruned(self, left: Consistent, most_us: float) -> tuple[Consistent, float]:
        bound = self.constant + bound_us(left.tables.values())
        if bound > most_us:
            raise InfeasibleError(f"no assignment costs {most_us} us or less: the bound is {bound} us")
        return pruned(left, most_us - bound), bound

    def dive(self) -> "BucketElimination | None":
        """Return this, complete, with the first assignment that a greedy search finds; None where it gave up.

        Raises:
            InfeasibleError: there is no assignment.
        """
        left = self.consistent()
        found = first_assignment(left, near_order(left), {}, most_backtracks=50)
        if found is None:
            return None
        complete = self.copy()
        complete._replace(found)
        return complete

    def halves(self) -> list["BucketElimination"]:
        """Return eliminations that share out the states of the variable with most rows; the cheaper half comes first.

        Raises:
            InfeasibleError: nothing is left of either.
        """
        left = self.consistent()
        rows = {v: sum(left.tables[place].rows for place in left.readers[v]) for v in left.readers}
        variable = max(rows, key=lambda v: (len(left.states(v)) > 1, rows[v], -v))
        states = left.states(variable)
        ranked = states[np.argsort(left.cheapest(variable)[states], kind="stable")]
        cheaper = np.zeros_like(left.domains[variable])
        cheaper[ranked[: (len(ranked) + 1) // 2]] = True
        halves = []
        for half in (cheaper, left.domains[variable] & ~cheaper):
            try:
                halves.append(self.narrowed({variable: half}))
            except InfeasibleError as error:
                reason = error
        if not halves:
            raise reason
        return halves

    def consistent(self) -> Consistent:
        """Return the tables, arc consistent; what bounds have left of them is so until a variable is eliminated."""
        if self._left is None:
            self._left = consistent(self.names, self.tables, self.state_counts)
        return self._left

    def _replace(self, left: Consistent) -> None:
        """Go on with these tables; a variable with a single state left is gone."""
        self.tables, self.readers, self._counts, self._left = {}, {}, {}, None
        settled = {v: np.flatnonzero(domain) for v, domain in left.domains.items() if domain.sum() == 1}
        nothing = CostTable("", (), np.zeros((0, 1), np.int32), np.zeros(1))
        self.argmins += [ArgminTable(v, nothing, states.astype(np.int32)) for v, states in settled.items()]
        for table in left.tables.values():
            self.add(table.without(settled))

    def add(self, table: CostTable) -> None:
        """Add a table, as one with every table whose variables are among its own, or that has all of its own."""
        table = self._absorbing(table, self._join)
        if table.variables:
            self._place(table)
            self._left = None
        else:
            self.constant += float(table.costs.sum())

    def _join(self, table: CostTable, other: CostTable) -> CostTable:
        return join(table, other, self.state_counts, self.limits)

    def _remove(self, place: int) -> CostTable:
        self._left = None
        return super()._remove(place)

    def _eliminate(self, variable: int, most_rows: float) -> tuple[int, ...]:
        """Minimise the variable out of its tables, unless a join has too many rows; return what stood beside it."""
        bucket = self._bucket(variable)
        joined = bucket[0]
        for table in bucket[1:]:
            joined = join(joined, table, self.state_counts, self.limits, most_rows)
        if not joined.rows:
            factors = ", ".join(repr(table.name) for table in bucket)
            raise InfeasibleError(f"no state of variable {self.names[variable]!r} fits all that name it: {factors}")
        self._take_bucket(variable)
        rest, states = minimised(joined, variable, self.state_counts)
        self.argmins.append(ArgminTable(variable, rest, states))
        self.add(rest)
        return rest.variables


def estimated_bytes(scopes: Iterable[tuple[int, ...]], alive: Mapping[int, int]) -> float:
    """Return what the largest table of an elimination without bounds needs at most, the lightest result first.

    Rows that are missing are counted as if they were there, so the truth may be far less.

    Args:
        scopes: the variables of each table.
        alive: how many states of each variable are left.

    Source:
        Kjaerulff, Triangulation of graphs (1990), for orders by weight.
    """
    near: dict[int, set[int]] = {}
    for scope in scopes:
        for variable in scope:
            near.setdefault(variable, set()).update(scope)
    bits = {v: log2(max(1, alive[v])) for v in near}
    weight = {v: sum(bits[u] for u in others) for v, others in near.items()}
    # Weights that no longer hold stay in the heap until they come up.
    heap = [(each, v) for v, each in weight.items()]
    heapify(heap)
    most = 0.0
    while heap:
        checkpoint()
        lightest, variable = heappop(heap)
        if weight.get(variable) != lightest:
            continue
        others = near.pop(variable)
        most = max(most, needed_bytes(2.0 ** weight.pop(variable), len(others)))
        others.discard(variable)
        for other in others:
            near[other] |= others
            near[other].discard(variable)
            weight[other] = sum(bits[u] for u in near[other])
            heappush(heap, (weight[other], other))
    return most
