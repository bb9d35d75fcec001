"""Buckets of variable elimination: which tables name a variable, and the order in which variables are eliminated."""

from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, Protocol, TypeVar

import numpy as np

from autotuner.checkpoint import checkpoint
from autotuner.errors import InfeasibleError
from autotuner.solve.limits import TooLargeError
from autotuner.solve.tables import Codes, Integers, product

Estimate = tuple[float, float]
"""Rows of the result of eliminating a variable, and of the join of its tables before that; the smallest goes first."""

UNKNOWN: Estimate = (inf, inf)


class Rows(Protocol):
    """Rows over the states of some variables: a table of costs, or of labels."""

    @property
    def name(self) -> str: ...

    @property
    def variables(self) -> tuple[int, ...]: ...

    @property
    def rows(self) -> int: ...

    def column(self, variable: int) -> Codes: ...


T = TypeVar("T", bound=Rows)


class Buckets(Generic[T]):
    """The tables that are left while variables are eliminated, by place, and the places of those that name a variable.

    Args:
        state_counts: number of states of each variable.
    """

    def __init__(self, state_counts: Sequence[int]) -> None:
        self.state_counts = tuple(state_counts)
        self.tables: dict[int, T] = {}
        self.readers: dict[int, dict[int, None]] = {}
        self._made = 0
        self._counts: dict[tuple[int, int], Integers] = {}

    @property
    def rows(self) -> int:
        """The number of rows that are left, of all tables."""
        return sum(table.rows for table in self.tables.values())

    def in_order(
        self,
        eliminate: Callable[[int, Estimate], tuple[int, ...]],
        stops: Callable[[Estimate], bool],
        kept: Collection[int] = (),
        *,
        stops_at_large: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Eliminate the variable whose result is estimated to be the smallest, again and again.

        Args:
            eliminate: takes a variable and its estimate out of the tables, and returns the variables beside it.
            stops: says of the smallest estimate whether to stop there.
            kept: variables that stay.
            stops_at_large: whether to stop where a result turned out too large, rather than put it off.

        Returns:
            Whether no variable is left but the kept ones.

        Raises:
            InfeasibleError: the tables of some variable share no row.
            TooLargeError: a result that was put off is too large still.
        """
        alive = self._alive()
        estimates = {v: self._estimate(v, alive) for v in self.readers if v not in kept}
        # Estimates that no longer hold stay in the heap until they come up.
        heap = [(estimate, v) for v, estimate in estimates.items()]
        heapify(heap)
        while heap:
            estimate, variable = heappop(heap)
            if estimates.get(variable) != estimate:
                continue
            if stops(estimate):
                return False
            try:
                touched = eliminate(variable, estimate)
            except TooLargeError:
                if estimate == UNKNOWN:
                    raise
                # Estimated too low; tables that are made later may still make it smaller.
                estimates[variable] = UNKNOWN
                heappush(heap, (UNKNOWN, variable))
                if stops_at_large():
                    return False
                continue
            del estimates[variable]
            for other in touched:
                if other not in kept:
                    estimates[other] = self._estimate(other, alive)
                    heappush(heap, (estimates[other], other))
        return True

    def _place(self, table: T) -> int:
        """Add a table as it is, and return its place."""
        place = self._made
        self.tables[place] = table
        for variable in table.variables:
            self.readers.setdefault(variable, {})[place] = None
        self._made += 1
        return place

    def _remove(self, place: int) -> T:
        table = self.tables.pop(place)
        for variable in table.variables:
            self._counts.pop((place, variable), None)
            del self.readers[variable][place]
        return table

    def _absorbing(self, table: T, join: Callable[[T, T], T]) -> T:
        """Return the table joined with every one whose variables are among its own or the other way; those go."""
        while (both := self._with_nested(table, join)) is not None:
            table = both
        return table

    def _with_nested(self, table: T, join: Callable[[T, T], T]) -> T | None:
        scope = set(table.variables)
        for place in {place: None for variable in table.variables for place in self.readers.get(variable, ())}:
            other = self.tables[place]
            if not (scope.issuperset(other.variables) or scope.issubset(other.variables)):
                continue
            try:
                both = join(table, other)
            except TooLargeError:
                continue
            self._remove(place)
            if not both.rows:
                raise InfeasibleError(f"no row of {table.name!r} agrees with any of {other.name!r}")
            return both
        return None

    def _take_bucket(self, variable: int) -> None:
        """Remove the tables of a variable, and the variable."""
        for place in list(self.readers[variable]):
            self._remove(place)
        del self.readers[variable]

    def _bucket(self, variable: int) -> list[T]:
        """Return the tables of a variable, smallest first."""
        return sorted((self.tables[place] for place in self.readers[variable]), key=lambda table: table.rows)

    def _alive(self) -> dict[int, int]:
        """Return how many states of each variable are left."""
        return {
            v: min(int(np.count_nonzero(self._counted(place, v))) for place in places)
            for v, places in self.readers.items()
        }

    def _counted(self, place: int, variable: int) -> Integers:
        """Return how many rows of a table each state of the variable has."""
        if (place, variable) not in self._counts:
            column = self.tables[place].column(variable)
            self._counts[place, variable] = np.bincount(column, minlength=self.state_counts[variable])
        return self._counts[place, variable]

    def _estimate(self, variable: int, alive: Mapping[int, int]) -> Estimate:
        """Estimate the rows of eliminating a variable.

        Exact for tables that share this variable alone; each other one that several name is taken as independent.

        Args:
            alive: how many states of each variable are left.
        """
        checkpoint()
        places = list(self.readers[variable])
        matches = self._counted(places[0], variable).astype(np.float64)
        for place in places[1:]:
            matches *= self._counted(place, variable)
        shared: dict[int, int] = {}
        for place in places:
            for other in self.tables[place].variables:
                shared[other] = shared.get(other, 0) + 1
        shared.pop(variable, None)
        joined = float(matches.sum()) / product(alive[v] ** (count - 1) for v, count in shared.items() if count > 1)
        return min(joined, product(alive[v] for v in shared)), joined
